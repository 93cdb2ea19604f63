"""Copy, digest and check an update's bytes: senders copy and digest, engine ranks digest and check what they received.

All operations on a piece come before those on the next one, so that a CPU reads it from memory once and then from its
cache.
"""

import torch
import xxhash

from coati_rl.errors import TransferError

_PIECE_BYTES = 2**20  # measured: of 0.25, 0.5, 1 and 2 MiB the fastest


def pack(tensor: torch.Tensor, target: torch.Tensor, hasher: "xxhash.xxh3_128") -> None:
    """Copy one-dimensional `tensor` to `target`; the digest is of the source, so that it verifies the packing too."""
    for piece, its_target in zip(_pieces(tensor), _pieces(target), strict=True):
        its_target.copy_(piece)
        _update(hasher, piece)


def digest(tensor: torch.Tensor, hasher: "xxhash.xxh3_128") -> None:
    """Add the bytes of one-dimensional `tensor` to the digest."""
    for piece in _pieces(tensor):
        _update(hasher, piece)


def digest_and_check(tensor: torch.Tensor, hasher: "xxhash.xxh3_128", *, name: str) -> None:
    """Digest as `digest` does. Raises: TransferError for NaN or infinity, both of which propagate into any sum."""
    sums = []
    for piece in _pieces(tensor):
        _update(hasher, piece)
        sums.append(piece.sum())
    # A sum of finite numbers may overflow, above all in float16: only then each number is checked.
    if not torch.stack(sums).isfinite().all() and not tensor.isfinite().all():
        raise TransferError(f"tensor {name!r} holds NaN or infinity; nothing was committed")


def _pieces(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return pieces that fit a CPU's cache; on CUDA, where an operation is a kernel launch, the whole tensor."""
    return torch.split(tensor, _PIECE_BYTES // tensor.itemsize if tensor.device.type == "cpu" else tensor.numel())


def _update(hasher: "xxhash.xxh3_128", piece: torch.Tensor) -> None:
    """Add the bytes of `piece`, without a copy for CPU tensors."""
    hasher.update(piece.view(torch.uint8).cpu().numpy().data)
