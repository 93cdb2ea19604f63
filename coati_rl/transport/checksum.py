"""Copy, digest and check an update's bytes: senders copy and digest, engine ranks digest and check what they received.

All operations on a piece come before those on the next one, so that a CPU reads it from memory once and then from its
cache. Bytes that all members of a group have on GPUs are digested there (`device_digest`). Others are digested on the
host; those of a GPU get there through two pinned buffers: while one piece is digested, the next one is copied.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.tensor_bytes import bytes_of

_PIECE_BYTES = 2**20  # measured: of 0.25, 0.5, 1 and 2 MiB the fastest
_PINNED_BYTES = 2**25  # of each of two buffers
_cuda: Any = torch.cuda  # whose streams and events have no type annotations


class HostCopies(Protocol):
    """Copy pieces of a GPU's memory to two buffers of the host."""

    def start(self, slot: int, piece: torch.Tensor) -> torch.Tensor:
        """Start copying `piece`, uint8[N], to buffer 0 or 1. Returns: the copy, uint8[N], complete after `wait`."""

    def wait(self, slot: int) -> None:
        """Return when the last copy to this buffer is complete."""


class Digest(Protocol):
    """Digest tensors in the order in which they are added, and refuse NaN and infinity in those that were received."""

    def add(self, tensor: torch.Tensor) -> None:
        """Add the bytes of one-dimensional `tensor`. A GPU's is read in the order of its current stream."""

    def add_received(self, tensor: torch.Tensor, *, arrived: torch.Tensor, name: str) -> None:
        """Do the same. Raises: TransferError for NaN or infinity, here or in `bytes`.

        Args:
            tensor: one-dimensional, of host memory or a GPU.
            arrived: the same values where they arrived: a GPU adds them up while the host digests them.
            name: of the tensor.
        """

    def bytes(self) -> bytes:
        """Return the 16 bytes of the digest of what was added."""


class HostDigest:
    """Implement `Digest` as xxh3-128 over the bytes of all tensors, however they are cut."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_128()
        self._copies: HostCopies | None = None
        self._copied: deque[tuple[int, torch.Tensor]] = deque()  # buffers whose copy is not yet in the digest
        self._num_copies = 0

    def add(self, tensor: torch.Tensor) -> None:
        """See `Digest.add`. The current stream of a GPU may go on."""
        for piece in _pieces(tensor):
            self._add(piece)

    def add_received(self, tensor: torch.Tensor, *, arrived: torch.Tensor, name: str) -> None:
        sums = [] if arrived.device == tensor.device else [arrived.sum()]
        for piece in _pieces(tensor):
            self._add(piece)
            if arrived.device == tensor.device:
                sums.append(piece.sum())
        check_finite([(name, arrived, total) for total in sums])

    def _add(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "cpu":
            self._flush()
            self._hasher.update(bytes_of(tensor))
            return
        if self._copies is None:
            self._copies = PinnedCopies(tensor.device)
        for piece in torch.split(tensor.view(torch.uint8), _PINNED_BYTES):
            slot, self._num_copies = self._num_copies % 2, self._num_copies + 1
            self._copied.append((slot, self._copies.start(slot, piece)))
            self._flush(keep=1)  # the copy that was started goes on meanwhile, to the other buffer

    def bytes(self) -> bytes:
        self._flush()
        return self._hasher.digest()

    def _flush(self, *, keep: int = 0) -> None:
        """Add copied pieces but for the last `keep`."""
        while self._copies is not None and len(self._copied) > keep:
            slot, copied = self._copied.popleft()
            self._copies.wait(slot)
            self._hasher.update(copied.numpy().data)


class PinnedCopies:
    """Implement `HostCopies` on a stream of its own.

    Order: the current stream (a piece is written) -> this stream (it is copied; an event) -> the current stream (it may
    be overwritten or freed) and, by the event, the host (it is digested). A buffer is used again when its piece is in
    the digest.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _cuda.Stream(device)
        self._buffers = [torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied = [_cuda.Event(blocking=True) for _ in range(2)]

    def start(self, slot: int, piece: torch.Tensor) -> torch.Tensor:
        current, target = _cuda.current_stream(self._device), self._buffers[slot][: piece.numel()]
        self._stream.wait_stream(current)
        with _cuda.stream(self._stream):
            target.copy_(piece, non_blocking=True)
            self._copied[slot].record(self._stream)
        current.wait_event(self._copied[slot])
        return target

    def wait(self, slot: int) -> None:
        self._copied[slot].synchronize()


def pack(tensor: torch.Tensor, target: torch.Tensor, digest: Digest) -> None:
    """Copy one-dimensional `tensor` to `target`; the digest is of the source, so that it verifies the packing too."""
    for piece, its_target in zip(_pieces(tensor), _pieces(target), strict=True):
        its_target.copy_(piece)
        digest.add(piece)


def check_finite(sums: Sequence[tuple[str, torch.Tensor, torch.Tensor]]) -> None:
    """Raise TransferError for NaN or infinity, both of which propagate into any sum.

    Args:
        sums: name, elements and a sum of each tensor, or of parts of it.
    """
    # A sum of finite numbers may overflow, above all in float16: only then each number is checked.
    are_finite = torch.stack([total.float() for _, _, total in sums]).isfinite().tolist() if sums else []
    for (name, values, _), is_finite in zip(sums, are_finite, strict=True):
        if not is_finite and not values.isfinite().all():
            raise TransferError(f"tensor {name!r} holds NaN or infinity; nothing was committed")


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return pieces that fit a CPU's cache; on CUDA, where an operation is a kernel launch, the whole tensor."""
    return torch.split(tensor, _PIECE_BYTES // tensor.itemsize if tensor.device.type == "cpu" else tensor.numel())
