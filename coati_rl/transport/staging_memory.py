"""Hold the memory in which an engine stages updates: host memory that its ranks can share, or a GPU's.

The first write to new host memory costs more than a transfer (a page fault per 4 KiB), and to pin it more still: it is
kept from one update to the next. CUDA's caching allocator has no such cost, and GPU memory is scarce: that is new for
each update, and freed after the commit.
"""

import mmap
import os
from typing import Any, Protocol

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.allocation import allocate
from coati_rl.transport.deadline import Deadline


class StagingMemory(Protocol):
    """Provide the memory of one update at a time."""

    def reserve(self, num_bytes: int, *, deadline: Deadline, what: str) -> torch.Tensor:
        """Return uint8[num_bytes], in which no former update is used any more."""

    def discard(self) -> None:
        """Use other memory for the next update: operations of a failed transfer may still write to this one."""


class GpuMemory:
    """Implement `StagingMemory` on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def reserve(self, num_bytes: int, *, deadline: Deadline, what: str) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def discard(self) -> None:
        """Do nothing: the memory is new each time."""


class SharedFile:
    """Own memory that other processes of the same user and node can map: a file without a name in any directory."""

    def __init__(self, num_bytes: int) -> None:
        """Take no memory yet."""
        self.num_bytes = num_bytes
        self._descriptor = os.memfd_create("coati-weights", os.MFD_CLOEXEC)
        os.truncate(self._descriptor, num_bytes)

    @property
    def path(self) -> str:
        """Return the path by which others open it while this process has not closed it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Close it; the memory is there while it is mapped somewhere."""
        os.close(self._descriptor)


class HostMemory:
    """Implement `StagingMemory` in host memory, pinned if it is read by a GPU."""

    def __init__(self, path: str | None = None, *, reader: torch.device | None = None) -> None:
        """Take the path of a `SharedFile` of the updates' size, or memory of this process's own.

        Args:
            path: of the file.
            reader: the device that loads from it.
        """
        self._path = path
        self._file: tuple[int, int] | None = None  # device and inode of what is mapped
        self._is_pinned_for = reader if reader is not None and reader.type == "cuda" else None
        self._memory: torch.Tensor | None = None

    def is_of(self, path: str | None) -> bool:
        """Return True if this is the memory of the file that has this path now; None is this process's own."""
        return path == self._path and (path is None or self._file in (None, _identity(path)))

    def reserve(self, num_bytes: int, *, deadline: Deadline, what: str) -> torch.Tensor:
        """See `StagingMemory.reserve`. Raises: TransferError if there is too little memory."""
        if self._memory is None or self._memory.numel() != num_bytes:
            self.discard()
            self._memory = self._map(num_bytes, deadline, what)
        return self._memory

    def discard(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None and self._is_pinned_for is not None:
            _runtime().cudaHostUnregister(memory.data_ptr())

    def _map(self, num_bytes: int, deadline: Deadline, what: str) -> torch.Tensor:
        what = f"{what}: {num_bytes} bytes of host memory"
        own = SharedFile(num_bytes) if self._path is None else None
        try:
            descriptor = os.open(own.path if own is not None else str(self._path), os.O_RDWR | os.O_CLOEXEC)
            try:
                self._file = _identity(descriptor)
                allocate(descriptor, num_bytes, deadline=deadline, what=what)
                memory = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise TransferError(f"{what}: {error}") from error
        finally:
            if own is not None:
                own.close()
        if self._is_pinned_for is not None:
            with torch.cuda.device(self._is_pinned_for):
                status = _runtime().cudaHostRegister(memory.data_ptr(), num_bytes, 0)
            if int(status) != 0:
                raise TransferError(f"{what} cannot be pinned: CUDA error {int(status)}")
        return memory


def _identity(file: int | str) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_dev, found.st_ino


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
