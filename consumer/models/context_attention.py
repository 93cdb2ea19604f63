"""Compute attention of one context-parallel rank's tokens to the tokens of all ranks, which it gathers.

Some heads of keys and values are gathered at a time, used and dropped, in the forward and again in the backward, which
has the output and the log-sum-exps of the forward; so a rank holds the keys and values of whole rows for a few heads of
one layer only. The gradients of keys and values are summed over ranks in float32, each rank keeping those of its own
tokens.

R rows, L tokens of a padded row, l of them on this rank, H heads of queries, N of keys, D size of a head.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coati_rl.config.model import FLOAT32_ATTENTION
from coati_rl.memory.context import GATHERED_ELEMENTS
from coati_rl.ops.vocab_chunks import slices
from consumer.models.attention_kernels import HALF
from consumer.models.context_cut import OwnPiece
from consumer.models.context_part import ContextPart
from consumer.models.path_attention import ForBackward, Settings, add_path_gradients, attend_path
from consumer.models.varlen_attention import VarlenPaths


def context_attention(
    query: Tensor, key: Tensor, value: Tensor, part: ContextPart, *, sliding_window: int | None, scaling: float
) -> Tensor:
    """Compute attention of this rank's tokens; collective over the context-parallel ranks, as is its backward.

    Args:
        query: [R, H, l, D]; key and value likewise, with N heads.
        key: see query.
        value: see query.
        part: of the micro-batch.
        sliding_window: number of tokens that a token sees, itself included; None: all before it.
        scaling: factor of the products of queries and keys.
    Returns: [R, l, H, D].
    """
    settings = Settings(sliding_window, scaling, part.longest_path)
    attended: Tensor = _GatheredAttention.apply(query, key, value, part, settings)
    return attended


class _GatheredAttention(torch.autograd.Function):
    """Gather keys and values of some heads, attend, and drop them; gather them again in the backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, part: ContextPart, settings: Settings) -> Tensor:
        dtype = _computed_in(query, part)
        attended = torch.empty_like(query.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format)
        log_sums = list[Tensor]()
        for heads, keys in _head_chunks(query, key, part):
            tensors = _whole(query, key, value, heads, keys, part, dtype)
            attended[:, :, heads], sums = _attend(*tensors, part, settings)
            log_sums.append(sums)
        ctx.save_for_backward(query, key, value, attended, *log_sums)
        ctx.of_call = part, settings
        return attended.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, attended, *log_sums = ctx.saved_tensors
        part, settings = ctx.of_call
        of_query, of_key, of_value = (torch.empty_like(tensor) for tensor in (query, key, value))
        for (heads, keys), sums in zip(_head_chunks(query, key, part), log_sums, strict=True):
            tensors = _whole(query, key, value, heads, keys, part, attended.dtype)
            of_out, out = (each[:, :, heads].to(attended.dtype) for each in (gradient, attended))
            of_own, *of_whole = _attend_backward(ForBackward(of_out, out, sums, *tensors), part, settings)
            of_query[:, heads] = of_own.transpose(1, 2)
            for summed in (of_value, of_key):
                summed[:, keys] = part.scatter_sums(of_whole.pop()).transpose(1, 2)
        return of_query, of_key, of_value, None, None


def _computed_in(query: Tensor, part: ContextPart) -> torch.dtype:
    """Return the precision of attention: on a CPU that of short samples is float32, as without context parallelism."""
    is_short = not query.is_cuda and part.longest_path <= FLOAT32_ATTENTION
    return torch.float32 if query.dtype in HALF and is_short else query.dtype


def _head_chunks(query: Tensor, key: Tensor, part: ContextPart) -> Iterator[tuple[slice, slice]]:
    """Yield slices of heads of queries, and of those of keys that they share, the same on all ranks."""
    num_keys, shared = key.shape[1], query.shape[1] // key.shape[1]
    at_a_time = max(1, GATHERED_ELEMENTS[query.device.type] // (part.order.numel() * key.shape[-1]))
    for keys in slices(num_keys, at_a_time):
        yield slice(keys.start * shared, keys.stop * shared), keys


def _whole(
    query: Tensor, key: Tensor, value: Tensor, heads: slice, keys: slice, part: ContextPart, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return some heads of this rank's queries, [R, l, H, D], and of the keys and values of rows, [R, L, N, D]."""
    whole, others = (part.gather_rows(tensor[:, keys].transpose(1, 2)).to(dtype) for tensor in (key, value))
    return query[:, heads].transpose(1, 2).to(dtype), whole, others


def _attend(query: Tensor, key: Tensor, value: Tensor, part: ContextPart, settings: Settings) -> tuple[Tensor, Tensor]:
    """Attend [R, l, H, D] to [R, L, N, D]. Returns: [R, l, H, D], and the log-sum-exps of the kernel."""
    if query.is_cuda and query.dtype in HALF:
        return VarlenPaths.of(part.pieces, query.device).attend(query, key, value, settings)
    attended, log_sums = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=torch.float32)
    for row, tokens, piece in _places(part):
        keys, values = (_along(each[row], piece.seen(settings.window)) for each in (key, value))
        found = attend_path(_by_head(query[row, tokens]), keys, values, settings)
        attended[row, tokens], log_sums[row, tokens] = (each[0].transpose(0, 1) for each in found)
    return attended, log_sums


def _attend_backward(of: ForBackward, part: ContextPart, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, in float32, in which several calls add to them."""
    gradient, attended, log_sums, query, key, value = of
    of_query, of_key, of_value = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
    into = of_query, of_key, of_value
    if query.is_cuda and query.dtype in HALF:
        paths = VarlenPaths.of(part.pieces, query.device)
        paths.add_gradients(of, settings, into=into)
        return into
    for row, tokens, piece in _places(part):
        ranges = piece.seen(settings.window)
        keys, values, of_keys, of_values = (_along(each[row], ranges) for each in (key, value, of_key, of_value))
        of_out, out, asking, of_asking = (_by_head(each[row, tokens]) for each in (gradient, attended, query, of_query))
        sums = log_sums[row, tokens].T[None]
        of_piece = ForBackward(of_out, out, sums, asking, keys, values)
        add_path_gradients(of_piece, settings, into=(of_asking, of_keys, of_values))
        if len(ranges) > 1:  # the gradients of the path are a copy
            for whole, joined in ((of_key, of_keys), (of_value, of_values)):
                parts = joined[0].transpose(0, 1).split([end - start for start, end in ranges])
                for (start, end), each in zip(ranges, parts, strict=True):
                    whole[row, start:end] = each
    return into


def _places(part: ContextPart) -> Iterator[tuple[int, slice, OwnPiece]]:
    """Yield the row, the tokens of this rank's in it, and the piece that they are."""
    for row, pieces in enumerate(part.pieces):
        start = 0
        for piece in pieces:
            yield row, slice(start, start + piece.length), piece
            start += piece.length


def _along(row: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Return the tokens of a path, [1, N, S, D], of a row [L, N, D]; a view if they are consecutive."""
    parts = [row[start:end] for start, end in ranges]
    return _by_head(parts[0] if len(parts) == 1 else torch.cat(parts))


def _by_head(tokens: Tensor) -> Tensor:
    """Return [1, H, T, D] of [T, H, D]."""
    return tokens.transpose(0, 1)[None]
