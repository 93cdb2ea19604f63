"""The passes over an update's bytes: senders copy and digest them, engine ranks digest and check what has arrived.

All passes over a piece are made before the next piece's, so that a CPU reads it from memory once and finds it in its
cache after that.
"""

import torch
import xxhash

from coati_rl.errors import TransferError

_PIECE_BYTES = 2**20  # measured: of 0.25, 0.5, 1 and 2 MiB the fastest


def pack(tensor: torch.Tensor, place: torch.Tensor, hasher: "xxhash.xxh3_128") -> None:
    """Copy one-dimensional `tensor` to `place`; the digest is of the source, so that it proves the packing too."""
    for piece, its_place in zip(_pieces(tensor), _pieces(place), strict=True):
        its_place.copy_(piece)
        _update(hasher, piece)


def digest(tensor: torch.Tensor, hasher: "xxhash.xxh3_128") -> None:
    """Of one-dimensional `tensor`."""
    for piece in _pieces(tensor):
        _update(hasher, piece)


def digest_and_check(tensor: torch.Tensor, hasher: "xxhash.xxh3_128", *, name: str) -> None:
    """The same. Raises: TransferError for NaN or infinity, both of which spread into any sum."""
    sums = []
    for piece in _pieces(tensor):
        _update(hasher, piece)
        sums.append(piece.sum())
    # A sum of finite numbers may be infinite, above all in float16: only then each number is looked at.
    if not torch.stack(sums).isfinite().all() and not tensor.isfinite().all():
        raise TransferError(f"tensor {name!r} holds NaN or infinity; nothing was committed")


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """On CUDA, where a pass is a kernel, the whole."""
    return torch.split(tensor, _PIECE_BYTES // tensor.itemsize if tensor.device.type == "cpu" else tensor.numel())


def _update(hasher: "xxhash.xxh3_128", piece: torch.Tensor) -> None:
    """With the bytes of `piece`; no copy for CPU tensors."""
    hasher.update(piece.view(torch.uint8).cpu().numpy().data)
