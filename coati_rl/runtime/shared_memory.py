"""Take the names from shared memory that processes hold, so that none of it is left when they end, however they end.

A segment or a semaphore in /dev/shm stays until its name is removed. Libraries remove the names when they are closed in
peace, which an actor never is: it is killed. Once all that open a name have done so, it can go at once.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


def family() -> list[int]:
    """Find the ids of this process and of all that descend from it."""
    return [os.getpid(), *(process.pid for process in psutil.Process().children(recursive=True))]


def unlink_mapped(pids: Iterable[int]) -> None:
    """Remove the names in /dev/shm of all that these processes map, in their place or in ours."""
    if not SHARED_MEMORY.is_dir():
        return
    mapped = {inode for pid in pids for inode in _mapped(pid)}
    for path in SHARED_MEMORY.iterdir():
        with suppress(FileNotFoundError, PermissionError):
            if path.lstat().st_ino in mapped:  # by inode: a semaphore is mapped under a name that it had before
                path.unlink()


def _mapped(pid: int) -> Iterator[int]:
    """Inodes of the file system of /dev/shm that a process maps; none if it has ended or is another user's."""
    device = SHARED_MEMORY.stat().st_dev
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            where, inode = line.split(maxsplit=5)[3:5]
            if where == f"{os.major(device):02x}:{os.minor(device):02x}":
                yield int(inode)
