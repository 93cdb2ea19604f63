"""Have a directory appear under its name complete or not at all, with every byte on the disk."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from coati_rl.disk import disk_problem, flush, flush_tree
from coati_rl.errors import RunError


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
    """Flush a hidden directory and rename it; an existing one is replaced."""
    flush_tree(partial)
    if directory.exists():
        # A rename cannot replace a directory that holds files, so the old one is renamed first.
        old = directory.with_name(f".{directory.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
        partial.rename(directory)
        shutil.rmtree(old)
    else:
        partial.rename(directory)
    flush(directory.parent)
