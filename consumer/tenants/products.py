"""Multiply the rows of several pieces at once where that gives the bits of each piece's own product.

How a library cuts a product into blocks, and so how it rounds, may depend on the number of rows or of matrices. Each
shape is therefore tried once, when it first occurs: each piece's product alone, and all in one call. If a bit differs,
that shape is computed piece by piece from then on. G pieces, m rows of each, K terms, N columns.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coati_rl.ops.cpu_products import linear_into, product

_BITS = {4: torch.int32, 2: torch.int16}
_are_equal: dict[tuple[Any, ...], bool] = {}  # by kind of product and its shapes


def times_shared(left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return left @ right.T + bias, [G, m, N], of [G, m, K], [N, K] and [N], without gradient.

    Args:
        left: contiguous.
        right: the same for all pieces.
        bias: likewise.
    """
    return _tried("linear", left, right, lambda rows: _linear(rows, right, bias), right.shape[0])


def times_shared_back(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, [G, m, N], of [G, m, K] and [K, N], without gradient."""
    return _tried("product", left, right, lambda rows: product(rows, right), right.shape[1])


def times_own(left: Tensor, right: Tensor) -> Tensor:
    """Return each piece's left @ right, [G, m, N], of [G, m, K] and [G, K, N], without gradient."""
    if len(left) == 1:
        return torch.mm(left[0], right[0])[None]
    key = ("own", left.dtype, left.device.type, left.shape, left.stride(), right.shape, right.stride())
    is_equal = _are_equal.get(key)
    if is_equal:
        return torch.bmm(left, right)
    alone = torch.stack([torch.mm(a, b) for a, b in zip(left, right, strict=True)])
    if is_equal is None:
        _are_equal[key] = _have_same_bits(alone, torch.bmm(left, right))
    return alone


def into_rank(rows: Tensor, factors: Tensor) -> Tensor:
    """Return each piece's rows @ factor.T, [G, m, r], of [G, m, K] and [G, r, K], without gradient.

    The narrow side is on the left: with a rank of 8, MKL computes that 3 to 7 times as fast as rows @ factor.T.
    """
    return times_own(factors, rows.transpose(1, 2)).transpose(1, 2)


def _tried(kind: str, left: Tensor, right: Tensor, multiply: Callable[[Tensor], Tensor], width: int) -> Tensor:
    shape = (*left.shape[:2], width)
    if len(left) == 1:
        return multiply(left[0]).view(shape)
    key = (kind, left.dtype, left.device.type, left.shape, right.shape, right.stride())
    is_equal = _are_equal.get(key)
    if is_equal:
        return multiply(left.flatten(0, 1)).view(shape)
    alone = torch.stack([multiply(each) for each in left])
    if is_equal is None:
        _are_equal[key] = _have_same_bits(alone, multiply(left.flatten(0, 1)).view(shape))
    return alone


def _linear(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return linear_into(rows.new_empty(len(rows), len(weight)), rows, weight, bias)


def _have_same_bits(one: Tensor, other: Tensor) -> bool:
    """Compare bits and not numbers: those of a model that has overflowed are not equal to themselves."""
    bits = _BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))
