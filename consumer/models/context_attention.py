"""Compute attention of one context-parallel rank's tokens to the tokens of all ranks, which it gathers.

Some heads of keys and values are gathered at a time, used and dropped, in the forward and again in the backward, which
computes their attention once more; so a rank holds the keys and values of whole rows for a few heads of one layer only.
The gradients of keys and values are summed over ranks in float32, each rank keeping those of its own tokens.

R rows, L tokens of a padded row, l of them on this rank, T tokens of a piece, P of its path before it, N heads of keys,
D size of a head.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.varlen import varlen_attn

from coati_rl.config.model import FLOAT32_ATTENTION
from coati_rl.ops.host_copies import on_device
from coati_rl.ops.vocab_chunks import slices
from consumer.models.attention_kernels import HALF, SHARED_HEADS, mask_maker
from consumer.models.context_cut import OwnPiece
from consumer.models.context_part import ContextPart

GATHERED_ELEMENTS = 2**23  # of keys that are gathered at a time: 32 MiB in float32, and as many values
QUERY_BLOCK = 256  # queries under one mask: their mask and the pairs that it hides are bounded


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, part: ContextPart, *, sliding_window: int | None, scaling: float
) -> Tensor:
    """Compute attention of this rank's tokens; collective over the context-parallel ranks, as is its backward.

    Args:
        query: [R, heads, l, D]; key and value likewise, with N heads.
        key: see query.
        value: see query.
        part: of the micro-batch.
        sliding_window: number of tokens that a token sees, itself included; None: all before it.
        scaling: factor of the products of queries and keys.
    Returns: [R, l, heads, D].
    """
    attended: Tensor = _GatheredAttention.apply(query, key, value, part, sliding_window, scaling)  # type: ignore[no-untyped-call]
    return attended


class _GatheredAttention(torch.autograd.Function):
    """Gather keys and values of some heads, attend, and drop them; the same in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        part: ContextPart,
        sliding_window: int | None,
        scaling: float,
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.settings = part, sliding_window, scaling
        attended = [
            _attend(query[:, heads], *_gathered(key, value, keys, part), part, sliding_window, scaling)
            for heads, keys in _head_chunks(query, key, part)
        ]
        return torch.cat(attended, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        part, sliding_window, scaling = ctx.settings
        of_query, of_key, of_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        for heads, keys in _head_chunks(query, key, part):
            whole = _gathered(key, value, keys, part)
            with torch.enable_grad():
                leaves = [tensor.detach().requires_grad_() for tensor in (query[:, heads], *whole)]
                attended = _attend(leaves[0], leaves[1], leaves[2], part, sliding_window, scaling)
            grads = torch.autograd.grad(attended, leaves, gradient[:, :, heads])
            of_query[:, heads] = grads[0]
            for out, grad in zip((of_key, of_value), grads[1:], strict=True):
                out[:, keys] = part.scatter_sums(grad).transpose(1, 2)
        return of_query, of_key, of_value, None, None, None


def _head_chunks(query: Tensor, key: Tensor, part: ContextPart) -> Iterator[tuple[slice, slice]]:
    """Yield slices of heads of queries, and of those of keys that they share, the same on all ranks."""
    num_keys, shared = key.shape[1], query.shape[1] // key.shape[1]
    at_a_time = max(1, GATHERED_ELEMENTS // (part.order.numel() * key.shape[-1]))
    for keys in slices(num_keys, at_a_time):
        yield slice(keys.start * shared, keys.stop * shared), keys


def _gathered(key: Tensor, value: Tensor, heads: slice, part: ContextPart) -> tuple[Tensor, Tensor]:
    """Return keys and values of all tokens in the order of the row, [R, L, N, D] of some heads."""
    whole, others = (part.gather_rows(tensor[:, heads].transpose(1, 2)) for tensor in (key, value))
    return whole, others


def _attend(
    query: Tensor, key: Tensor, value: Tensor, part: ContextPart, sliding_window: int | None, scaling: float
) -> Tensor:
    """Attend [R, heads, l, D] to [R, L, N, D]. Returns: [R, l, heads, D]."""
    if query.is_cuda and query.dtype in HALF:
        return _attend_varlen(query, key, value, part, sliding_window, scaling)
    if query.dtype in HALF and part.longest_path <= FLOAT32_ATTENTION:  # as without context parallelism
        attended = _attend(query.float(), key.float(), value.float(), part, sliding_window, scaling)
        return attended.to(query.dtype)
    rows, deepest = [], part.longest_path
    for row, pieces in enumerate(part.pieces):
        queries = query[row : row + 1].split([piece.length for piece in pieces], dim=2)
        keys, values = (tensor[row : row + 1].transpose(1, 2) for tensor in (key, value))
        of_pieces = [
            _attend_piece(q, *_along(piece, keys, values, sliding_window), sliding_window, scaling, deepest)
            for q, piece in zip(queries, pieces, strict=True)
        ]
        rows.append(torch.cat(of_pieces, dim=2))
    return torch.cat(rows).transpose(1, 2)


def _along(piece: OwnPiece, keys: Tensor, values: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """Return keys and values [1, N, P + T, D] of a piece's path; behind a window only those that a query sees."""
    parts = [[tensor[:, :, start:end] for start, end in piece.ranges] for tensor in (keys, values)]
    key, value = (each[0] if len(each) == 1 else torch.cat(each, dim=2) for each in parts)
    seen = piece.num_keys if window is None else min(piece.num_keys, piece.length + window - 1)
    return key[:, :, piece.num_keys - seen :], value[:, :, piece.num_keys - seen :]


def _attend_piece(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scaling: float, deepest: int
) -> Tensor:
    """Attend causally, the last query aligned to the last key: [1, heads, T, D] to [1, N, P + T, D].

    `deepest`: the most tokens that any query of the micro-batch is behind, so that all share one mask.
    """
    length, num_keys = query.shape[2], key.shape[2]
    attend = F.scaled_dot_product_attention
    if length == num_keys and (window is None or length <= window):
        return attend(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    deepest = deepest if window is None else min(deepest, window)
    mask = mask_maker(window)(QUERY_BLOCK, deepest, query.dtype, query.device)
    past, blocks = num_keys - length, []
    for block in slices(length, QUERY_BLOCK):
        count, last = block.stop - block.start, past + block.stop
        before = past + block.start if window is None else min(past + block.start, window - 1)
        seen, seen_values = (tensor[:, :, last - count - before : last] for tensor in (key, value))
        of_block = mask[:count, deepest - before : deepest + count]
        blocks.append(attend(query[:, :, block], seen, seen_values, of_block, scale=scaling, enable_gqa=True))
    return torch.cat(blocks, dim=2)


def _attend_varlen(
    query: Tensor, key: Tensor, value: Tensor, part: ContextPart, window: int | None, scaling: float
) -> Tensor:
    """Run flash attention over all pieces at once (half precision on GPUs); see `_attend`."""
    rows, heads, length, size = query.shape
    pieces = [piece for row in part.pieces for piece in row]
    of_queries, of_keys = ([piece.length for piece in pieces], [piece.num_keys for piece in pieces])
    boundaries, key_boundaries = (_boundaries(each, query.device) for each in (of_queries, of_keys))
    paths = [(row, *each) for row, of_row in enumerate(part.pieces) for piece in of_row for each in piece.ranges]
    k, v = (torch.cat([tensor[row, start:end] for row, start, end in paths]) for tensor in (key, value))
    q = query.transpose(1, 2).reshape(rows * length, heads, size)
    seen = (-1 if window is None else window - 1, 0)  # tokens before and after the query
    longest, longest_key = max(of_queries), max(of_keys)
    attended = varlen_attn(
        q,
        k,
        v,
        boundaries,
        key_boundaries,
        longest,
        longest_key,
        scale=scaling,
        window_size=seen,
        **SHARED_HEADS,
    )
    return cast(Tensor, attended).view(rows, length, heads, size)


def _boundaries(lengths: list[int], device: torch.device) -> Tensor:
    """Return int32[len(lengths) + 1], cumulative."""
    ends = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)
    return on_device(ends, device)
