"""Unlink the shared memory that processes have mapped, so that none is left when they end, however they end.

A segment or a semaphore in /dev/shm stays until its name is removed. Libraries remove the names in an orderly exit,
which an actor never has: it is killed. A name can be removed as soon as all processes that need it have opened it.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def family() -> list[int]:
    """Return the ids of this process and of all its descendants."""
    return [os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))]


def unlink_mapped(pids: Iterable[int]) -> None:
    """Remove the names in /dev/shm of all that these processes have mapped."""
    if not SHARED_MEMORY.is_dir():
        return
    mapped = {inode for pid in pids for inode in _mapped(pid)}
    for path in SHARED_MEMORY.iterdir():
        with suppress(FileNotFoundError, PermissionError):
            if path.lstat().st_ino in mapped:  # by inode: a semaphore is mapped under a name that it had before
                path.unlink()


def _mapped(pid: int) -> Iterator[int]:
    """Yield the inodes of /dev/shm that a process has mapped; none if it has ended or is another user's."""
    device = SHARED_MEMORY.stat().st_dev
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            where, inode = line.split(maxsplit=5)[3:5]
            if where == f"{os.major(device):02x}:{os.minor(device):02x}":
                yield int(inode)
