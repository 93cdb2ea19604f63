"""Describe errors of the disk in one sentence (file, cause, remedy), and test paths before a run starts."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from coati_rl.errors import ConfigError, RunError

_PROBE_BYTES = 2**16
_REMEDIES = {
    errno.ENOSPC: "free space there (of a run, --keep-checkpoints N deletes older checkpoints)",
    errno.EDQUOT: "free some of your quota there (of a run, --keep-checkpoints N deletes older checkpoints)",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "mount it writable, or write elsewhere",
    errno.EACCES: "make it writable for this user, or write elsewhere",
}


def disk_problem(path: Path, error: OSError) -> str:
    """Describe in one sentence why a file could not be written, and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "check that disk")
    return f"{path} cannot be written: {error.strerror or error}; {remedy}"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError of a block that writes a file to a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(disk_problem(path, error)) from error


def flush(path: Path) -> None:
    """Force a file's bytes, or a directory's entries, to the disk. Raises: OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(directory: Path) -> None:
    """Do so with all that is in a directory, and with itself."""
    for path in [*directory.rglob("*"), directory]:
        flush(path)


def probe(directory: Path, *, asked_by: str) -> None:
    """Write and delete an unnamed file.

    Args:
        directory: may not exist yet; the nearest existing parent is tested then.
        asked_by: the flag and its value, for the message.
    Raises: ConfigError if it cannot be written.
    """
    directory = _existing(directory)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(f"{asked_by}: {disk_problem(directory, error)}") from error


def check_free_space(directory: Path, *, needed: int) -> None:
    """Raise ConfigError if the disk of a directory, which may not exist yet, has less than `needed` bytes free."""
    free = free_bytes(directory)
    if free < needed:
        raise ConfigError(
            f"{directory}: a checkpoint takes about {size_text(needed)}, and {size_text(free)} are free; "
            "free space there, or write checkpoints elsewhere with --save-dir"
        )


def _existing(path: Path) -> Path:
    path = path.expanduser().absolute()
    return next((parent for parent in (path, *path.parents) if parent.exists()), path)


def free_bytes(directory: Path) -> int:
    """Return what is free on the disk of a directory, which may not exist yet."""
    return shutil.disk_usage(_existing(directory)).free


def size_text(num_bytes: int) -> str:
    """Return "1.5 GiB", or MiB below one GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
