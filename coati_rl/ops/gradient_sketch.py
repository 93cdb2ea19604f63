"""Summarise a tensor of a gradient by its squared norm and a few signed sums, which a replay compares (docs/replay.md).

All are sums over elements, so that the parts of a tensor on several ranks add up to those of the whole one. The sign
of an element in a sum is that of its row times that of its column, where rows have the last dimension: a sum is a
product with two vectors, and no sign is stored for each element. Signs come from the bytes of SHAKE-256, at places that
the tensor's name decides: the same on every machine and in every version.
"""

import functools
import hashlib
import zlib
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

NUM_SUMS = 4
_NUM_SIGNS = 2**18  # of each sum; longer rows begin again
_PIECE_ELEMENTS = 2**22  # in float64 at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardPlace:
    """Say where a rank's part of a tensor is: consecutive elements of a shard, which is a block of the whole tensor."""

    start: int = 0  # of the part, in elements of the flattened shard
    row_length: int  # elements of a row of the shard
    first_row: int = 0  # of the shard, in the whole tensor
    first_column: int = 0


def place_of(shape: tuple[int, ...], *, start: int = 0, split_dim: int | None = None, offset: int = 0) -> ShardPlace:
    """Return the place of a part.

    Args:
        shape: of the shard.
        start: of the part, in elements of the flattened shard.
        split_dim: dimension that shards cut the whole tensor along, the first or the last one; None: there is one.
        offset: of the shard along that dimension.
    """
    is_last = split_dim is not None and split_dim == len(shape) - 1
    return ShardPlace(
        start=start,
        row_length=shape[-1] if shape else 1,
        first_row=0 if is_last or split_dim is None else offset * prod(shape[1:-1]),
        first_column=offset if is_last else 0,
    )


@torch.no_grad()
def summary_of(gradient: Tensor, name: str, place: ShardPlace) -> Tensor:
    """Return float64[1 + NUM_SUMS] of a part of a tensor: the sum of squares, and the signed sums.

    Args:
        gradient: the part, of any shape, on any device; zeros behind the shard's end count nothing.
        name: of the tensor.
        place: of the part.
    """
    summary = torch.zeros(1 + NUM_SUMS, dtype=torch.float64, device=gradient.device)
    if not gradient.numel():
        return summary
    width = place.row_length
    before = place.start % width
    flat = gradient.reshape(-1)
    flat = F.pad(flat, (before, -(before + len(flat)) % width)) if before or len(flat) % width else flat
    rows = flat.view(-1, width)
    first = place.first_row + place.start // width
    of_columns = _signs(f"{name} columns", place.first_column, width, gradient.device)
    num_rows = max(1, _PIECE_ELEMENTS // width)
    for begin in range(0, len(rows), num_rows):
        piece = rows[begin : begin + num_rows].double()
        of_rows = _signs(f"{name} rows", first + begin, len(piece), gradient.device)
        summary[0] += piece.square().sum()
        summary[1:] += ((piece @ of_columns) * of_rows).sum(dim=0)
    return summary


def _signs(stream: str, first: int, count: int, device: torch.device) -> Tensor:
    """Return float64[count, NUM_SUMS] of 1 and -1, from place `first` of a stream on."""
    table = _table(device)
    start = (zlib.crc32(stream.encode()) + first) % _NUM_SIGNS
    if start + count <= _NUM_SIGNS:
        return table[start : start + count]
    return table[torch.arange(start, start + count, device=device) % _NUM_SIGNS]


@functools.lru_cache(maxsize=4)
def _table(device: torch.device) -> Tensor:
    """Return float64[_NUM_SIGNS, NUM_SUMS]."""
    drawn = hashlib.shake_256(b"signs of gradient sketches").digest(_NUM_SIGNS * NUM_SUMS // 8)
    bits = np.unpackbits(np.frombuffer(drawn, dtype=np.uint8)).reshape(_NUM_SIGNS, NUM_SUMS)
    return torch.tensor(1.0 - 2.0 * bits, dtype=torch.float64, device=device)
