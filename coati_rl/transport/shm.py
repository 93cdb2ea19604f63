"""Share CPU memory as a file in /dev/shm whose name is removed as soon as all members have opened it.

The name contains the rendezvous' random id, so that any member can remove it when another fails. The file outlives a
transfer only if all members are killed at once between its creation and its opening; it has no pages then.
"""

import mmap
import os
import warnings
from contextlib import suppress
from io import FileIO
from pathlib import Path

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.allocation import allocate
from coati_rl.transport.deadline import Deadline

SHM_DIRECTORY = Path("/dev/shm")


class ShmSegment:
    """Implement `Segment`. Members other than the owner map it read-only, so that none can change what others read."""

    def __init__(self, group: str, name: str, num_bytes: int) -> None:
        """Take the random id of the group, and a name that is unique within it."""
        self._path = SHM_DIRECTORY / f"coati-{group}-{name}"
        self._num_bytes = num_bytes
        self._file: FileIO | None = None

    def create(self) -> str:
        try:
            self._file = FileIO(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600), "r+")
            self._file.truncate(self._num_bytes)  # no memory is taken before `map`
        except OSError as error:
            raise TransferError(f"cannot create shared memory: {error}") from error
        return ""

    def open(self, text: str) -> None:
        try:
            self._file = FileIO(self._path)
        except OSError as error:
            raise TransferError(
                f"cannot open the trainer's shared memory: {error}; the shm transport needs one node and one user: "
                "choose --weight-transport gloo"
            ) from error

    def remove_name(self) -> None:
        with suppress(FileNotFoundError, PermissionError):
            self._path.unlink()

    def map(self, *, is_owner: bool, deadline: Deadline, what: str) -> torch.Tensor:
        file = self._file
        if file is None:
            raise TransferError(f"{what}: neither created nor opened")
        try:
            if is_owner:
                self._allocate(file.fileno(), deadline, what)
                mapped = mmap.mmap(file.fileno(), self._num_bytes)
            else:
                mapped = mmap.mmap(file.fileno(), self._num_bytes, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise TransferError(f"{what}: cannot map it: {error}") from error
        finally:
            self.close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(mapped, dtype=torch.uint8)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def synchronize(self) -> None:
        """Do nothing: the byte that announces a bucket is sent through the kernel after the bucket was written."""

    def _allocate(self, descriptor: int, deadline: Deadline, what: str) -> None:
        try:
            allocate(descriptor, self._num_bytes, deadline=deadline, what=what)
        except OSError as error:
            free = os.fstatvfs(descriptor)
            raise TransferError(
                f"{what}: {error.strerror}: {SHM_DIRECTORY} has {free.f_bavail * free.f_frsize} bytes available; "
                f"{self._num_bytes} are needed, and as much again for the next update: enlarge it "
                "(docker run --shm-size) or choose --weight-transport gloo"
            ) from error
