"""Compute attention of many padded sequences of a row, those of equal length in one call.

Attention treats the sequences of a batch apart, so that what one gets does not depend on the others. L tokens of the
row, D size of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroups:
    """Say which sequences of a row have equal lengths."""

    sizes: tuple[tuple[int, int], ...]  # length and number of sequences, of each group
    order: Tensor | None  # int64[L], the tokens by groups; None: they are in this order
    inverse: Tensor | None  # int64[L]


def sequence_groups(batches: Sequence[Sequence[int]], device: torch.device) -> SequenceGroups:
    """Return the groups of sequences that follow each other in a row.

    Args:
        batches: lengths of consecutive sequences; only those of one batch are put together.
        device: of the row.
    """
    found: list[tuple[int, list[int]]] = []  # length, and starts
    start = 0
    for batch in batches:
        of_batch: dict[int, list[int]] = {}
        for length in batch:
            of_batch.setdefault(length, []).append(start)
            start += length
        found += sorted(of_batch.items())
    sizes = tuple((length, len(starts)) for length, starts in found)
    starts = [each for _, starts in found for each in starts]
    if starts == sorted(starts):
        return SequenceGroups(sizes, None, None)
    lengths = [length for length, count in sizes for _ in range(count)]
    order = torch.cat([torch.arange(at, at + length) for at, length in zip(starts, lengths, strict=True)])
    return SequenceGroups(sizes, order.to(device), order.argsort().to(device))


def grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, groups: SequenceGroups, attend: Callable[[Any, Any, Any], Tensor]
) -> Tensor:
    """Compute causal attention within each sequence.

    Args:
        query: [1, heads, L, D]; key and value likewise, possibly with fewer heads.
        groups: of the row.
        attend: causal attention of [R, heads, T, D], key and value likewise; returns [R, T, heads, D].
    Returns: [1, L, heads, D].
    """
    rows = [_moved(tensor[0].transpose(0, 1), groups.order, groups.inverse) for tensor in (query, key, value)]
    parts = zip(*(each.split([length * count for length, count in groups.sizes]) for each in rows), strict=True)
    attended = [
        attend(*(part.unflatten(0, (count, length)).transpose(1, 2) for part in of_group)).flatten(0, 1)
        for (length, count), of_group in zip(groups.sizes, parts, strict=True)
    ]
    joined = attended[0] if len(attended) == 1 else torch.cat(attended)
    return _moved(joined, groups.inverse, groups.order)[None]


def _moved(rows: Tensor, order: Tensor | None, inverse: Tensor | None) -> Tensor:
    """Return rows [L, ...] in another order; `inverse` leads back."""
    return rows if order is None else _Moved.apply(rows, order, inverse)


class _Moved(torch.autograd.Function):
    """Index with a gradient that is an index, too: torch's adds rows to zeros."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.inverse), None, None
