"""Have a directory appear under its name complete or not at all, with every byte on the disk."""

import ctypes
import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from coati_rl.disk import disk_problem, flush, flush_tree
from coati_rl.errors import RunError

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux's renameat2


@contextmanager
def weight_disk_errors(directory: Path, what: str = "checkpoint") -> Iterator[None]:
    """Raise the errors of the disk, and those of safetensors, as a RunError. `what`: is written."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{what} {disk_problem(directory, error)}") from error
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))  # Rust's text for an errno
        cause = OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))
        raise RunError(f"{what} {disk_problem(directory, cause)}") from error


def publish(partial: Path, directory: Path) -> None:
    """Flush a hidden directory and rename it; an existing one is replaced, at any moment by either of them.

    Not so on a file system that cannot exchange two names (NFS): a kill between two renames leaves the former one
    hidden there, under .NAME.old.
    """
    flush_tree(partial)
    if not directory.exists():
        partial.rename(directory)
        flush(directory.parent)
        return
    old = partial
    if not _exchange(partial, directory):
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
        partial.rename(directory)
    flush(directory.parent)
    shutil.rmtree(old)


def _exchange(first: Path, second: Path) -> bool:
    """Exchange two names at once. Returns: False where the system cannot. Raises: OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS):
        return False
    raise OSError(number, os.strerror(number), str(second))
