"""Give back the memory of tensors for a while and keep their contents elsewhere, bit for bit.

Tensors, their views and whatever else refers to their storages stay what they are: storages are emptied, and filled
again in place. A GPU's contents are kept in pinned host memory, those of the CPU in a file without a name.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from coati_rl.errors import RunError
from coati_rl.processes.freed_memory import return_freed_memory
from coati_rl.tensor_bytes import bytes_of
from coati_rl.text import first_line


class _Keeper(Protocol):
    """Keep bytes."""

    def put(self, contents: Sequence[Tensor]) -> None:
        """Store these bytes in place of those before."""

    def get(self, contents: Sequence[Tensor]) -> None:
        """Write what was stored last to these tensors, which have the same sizes."""


class TensorOffload:
    """Offload tensors, again and again; while they are offloaded they must not be used."""

    def __init__(self, *, device: torch.device, directory: Path, flag: str) -> None:
        """Offload nothing yet.

        Args:
            device: of the tensors.
            directory: of the file, if the device is the CPU.
            flag: by which the user wants it, for messages.
        """
        self._device, self._flag = device, flag
        self._keeper: _Keeper = _PinnedMemory() if device.type == "cuda" else _File(directory, flag)
        self._offloaded: list[tuple[UntypedStorage, int]] = []

    @property
    def num_bytes(self) -> int:
        """Return the number of bytes that are offloaded."""
        return sum(size for _, size in self._offloaded)

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Keep the contents of these tensors' storages and free the memory; maps of files stay, which cost none.

        Raises: RunError if there is no room for the contents; no memory is given back then.
        """
        if self._offloaded:
            raise ValueError("tensors are offloaded already")
        found = _storages(tensors, self._device)
        self._keeper.put([_bytes(storage) for storage in found])
        self._empty([(storage, storage.nbytes()) for storage in found])

    def onload(self) -> None:
        """Give the tensors memory and contents back, if they are offloaded. Raises: RunError if there is no room."""
        if not self._offloaded:
            return
        try:
            for storage, size in self._offloaded:
                storage.resize_(size)
        except RuntimeError as error:  # of PyTorch: a GPU's or the host's memory is full
            raise RunError(
                f"there is no memory for {self.num_bytes / 2**30:.2g} GiB of a trainer's weights and optimizer states "
                f"({self._flag}): {first_line(error)}"
            ) from error
        self._keeper.get([_bytes(storage) for storage, _ in self._offloaded])
        self._offloaded = []

    @contextmanager
    def onloaded(self) -> Iterator[None]:
        """Give the tensors memory and contents back inside of the block, which must not change them."""
        offloaded = self._offloaded
        self.onload()
        try:
            yield
        finally:
            self._empty(offloaded)

    def _empty(self, storages: list[tuple[UntypedStorage, int]]) -> None:
        """Free the memory of storages whose contents are kept."""
        self._offloaded = storages
        if not storages:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()  # kernels of other streams may read what is freed
        for storage, _ in storages:
            storage.resize_(0)
        return_freed_memory(self._device)


class _File:
    """Keep bytes in a file that ends with this process."""

    def __init__(self, directory: Path, flag: str) -> None:
        self._directory, self._flag = directory, flag
        self._file: Any = None

    def put(self, contents: Sequence[Tensor]) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115, kept open
            self._file.seek(0)
            for each in contents:
                _all(self._file.write, each)
        except OSError as error:
            raise RunError(
                f"weights and optimizer states of a trainer cannot be kept in {self._directory} while they are not "
                f"used ({self._flag}): {error.strerror}"
            ) from error

    def get(self, contents: Sequence[Tensor]) -> None:
        self._file.seek(0)
        for each in contents:
            _all(self._file.readinto, each)


class _PinnedMemory:
    """Keep bytes of a GPU in host memory, which is allocated once."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def put(self, contents: Sequence[Tensor]) -> None:
        if [each.numel() for each in self._kept] != [each.numel() for each in contents]:
            self._kept = [torch.empty(each.numel(), dtype=torch.uint8, pin_memory=True) for each in contents]
        for kept, each in zip(self._kept, contents, strict=True):
            kept.copy_(each, non_blocking=True)
        torch.cuda.synchronize()

    def get(self, contents: Sequence[Tensor]) -> None:
        for kept, each in zip(self._kept, contents, strict=True):
            each.copy_(kept, non_blocking=True)
        torch.cuda.synchronize()


def storage_of(tensor: Tensor) -> UntypedStorage:
    """Return the storage of a tensor; of a DTensor that of this rank's part."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    storage: UntypedStorage = local.untyped_storage()
    return storage


def without_storages_of(tensors: Iterable[Tensor], others: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors without those whose storages others have, too, with memory or without."""
    kept = {storage_of(each)._cdata for each in others}
    return [each for each in tensors if storage_of(each)._cdata not in kept]


def _storages(tensors: Iterable[Tensor], device: torch.device) -> list[UntypedStorage]:
    """Return the storages of a device that tensors are parts of, each once."""
    found = dict[int, UntypedStorage]()
    for tensor in tensors:
        storage = storage_of(tensor)
        if storage.device.type == device.type and storage.nbytes() and storage.resizable():
            found.setdefault(storage.data_ptr(), storage)
    return [*found.values()]


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _all(transfer: Any, content: Tensor) -> None:
    """Write or read all bytes of a tensor; the kernel moves at most 2 GiB at a time."""
    left = bytes_of(content)
    while left:
        if not (moved := transfer(left)):
            raise RunError("what was offloaded is shorter than it was")
        left = left[moved:]
