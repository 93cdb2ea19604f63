"""Compute attention within each sample of a packed row, without a mask over the row and without work across samples.

Under a block-diagonal mask a row costs as much as one sample of the row's length, in time and, for the mask, in memory.
Here transformers' SDPA function runs for each sample of a row; at 16 samples of 80 tokens a training step is 2.4 times
as fast. In half precision on a GPU one call of flash attention's varlen kernel handles all samples.

Where samples share prefixes, a segment attends to its path: its ancestors, the root first, then itself. Keys and values
of the path are joined; a query sees those up to its own place, so that the causal mask is aligned to the last key.
R rows, L tokens per row, T tokens of a segment, P of its ancestors, D size of a head.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from coati_rl.config.model import FLOAT32_ATTENTION, PACKED_ATTENTION
from coati_rl.ops.host_copies import on_device
from consumer.models.attention_kernels import HALF, SHARED_HEADS, mask_maker
from consumer.models.context_attention import context_attention
from consumer.models.context_part import ContextPart
from consumer.models.grouped_attention import SequenceGroups, grouped_attention

NAME = "packed_sdpa"  # registered with transformers

# Architectures whose attention `packed_attention` computes; a test compares each with its own implementation. Others
# (with logit caps, sinks, position biases) use transformers' masks, which it derives from position_ids; these cannot
# share prefixes.
MODEL_TYPES = PACKED_ATTENTION

# For each row: the tokens of its segments and of its padding, which add up to L; the parents of these, by their place
# in the row, -1 without one.
RowLengths = tuple[tuple[int, ...], ...]
RowParents = tuple[tuple[int, ...], ...]


def row_lengths(segments: NDArray[np.int32], shape: tuple[int, ...]) -> RowLengths | None:
    """Return the lengths of each row's segments and of its padding.

    Args:
        segments: int32[K, 4] of row, start, length, parent; see `coati_rl.batch`.
        shape: (R, L).
    Returns: None if no row holds more than one segment; causal attention over whole rows suffices then, since padding
        comes last.
    """
    num_rows, length = shape
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for row, _, size, _ in segments.tolist():
        rows[row].append(size)
    if all(len(row) <= 1 for row in rows):
        return None
    paddings = [length - sum(row) for row in rows]
    return tuple((*row, padding) if padding else tuple(row) for row, padding in zip(rows, paddings, strict=True))


def row_parents(segments: NDArray[np.int32], lengths: RowLengths | None) -> RowParents | None:
    """Return the parents of each row's segments and of its padding, which has none.

    Args:
        segments: int32[K, 4] of row, start, length, parent; a parent comes before its children, in the same row.
        lengths: of `row_lengths`.
    Returns: None if no segment has a parent.
    Raises: ValueError if a parent is not an earlier segment of the row.
    """
    if lengths is None or not (segments[:, 3] >= 0).any():
        return None
    rows: list[list[int]] = [[] for _ in lengths]
    places = list[int]()  # of each segment, in its row
    for index, (row, _, _, parent) in enumerate(segments.tolist()):
        if parent >= index or (parent >= 0 and segments[parent, 0] != row):
            raise ValueError(f"segment {index} names {parent} as its parent, which is not before it in row {row}")
        places.append(len(rows[row]))
        rows[row].append(-1 if parent < 0 else places[parent])
    return tuple((*row, *[-1] * (len(of_row) - len(row))) for row, of_row in zip(rows, lengths, strict=True))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengths: RowLengths | None = None,
    parents: RowParents | None = None,
    groups: SequenceGroups | None = None,
    sliding_window: int | None = None,
    context: ContextPart | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention in packed rows; the model calls this instead of its own attention.

    Args:
        module: the layer's attention.
        query: [R, heads, L, D]; key and value likewise, possibly with fewer heads.
        attention_mask: None, since transformers makes no mask for an attention function that it does not know.
        lengths: see `row_lengths`.
        parents: see `row_parents`; None: no segment has one.
        groups: sequences of the only row by their lengths, in place of `lengths`.
        sliding_window: number of tokens that a token sees, itself included; None: all before it.
        context: the rows are this context-parallel rank's tokens of them, whose segments it holds; None: whole rows.
        kwargs: scaling and dropout, for transformers' function.
    Returns: ([R, L, heads, D], None).
    """
    if sliding_window is None:  # Qwen2-MoE tells it to transformers' masks alone
        sliding_window = getattr(module, "sliding_window", None)
    if groups is not None:
        attend = functools.partial(_attend, module, sliding_window=sliding_window, **kwargs)
        return grouped_attention(query, key, value, groups, attend), None
    if context is not None:
        if kwargs.get("dropout"):
            raise ValueError("attention of context-parallel ranks has no dropout")
        scaling = kwargs["scaling"]
        return context_attention(query, key, value, context, sliding_window=sliding_window, scaling=scaling), None
    if query.is_cuda and query.dtype in HALF:
        return _attend_varlen(query, key, value, lengths, parents, sliding_window, kwargs["scaling"]), None
    if query.dtype in HALF and _longest_path(lengths or ((query.shape[2],),), parents) <= FLOAT32_ATTENTION:
        full = (query.float(), key.float(), value.float())
        return _attend_rows(module, *full, lengths, parents, sliding_window, **kwargs).to(query.dtype), None
    return _attend_rows(module, query, key, value, lengths, parents, sliding_window, **kwargs), None


def _attend_rows(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: RowLengths | None,
    parents: RowParents | None,
    sliding_window: int | None,
    **kwargs: Any,
) -> Tensor:
    """Return [R, L, heads, D]: the attention of each segment alone, or of each path of segments."""
    if lengths is None:
        return _attend(module, query, key, value, sliding_window, **kwargs)
    rows = []
    for r, row in enumerate(lengths):
        parts = [tensor[r : r + 1].split(row, dim=2) for tensor in (query, key, value)]
        if parents is None:
            samples = [_attend(module, q, k, v, sliding_window, **kwargs) for q, k, v in zip(*parts, strict=True)]
        else:
            queries, keys, values = parts
            samples = _attend_paths(module, queries, keys, values, parents[r], sliding_window, **kwargs)
        rows.append(torch.cat(samples, dim=1))
    return torch.cat(rows)


def _attend_paths(
    module: nn.Module,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    parents: tuple[int, ...],
    sliding_window: int | None,
    **kwargs: Any,
) -> list[Tensor]:
    """Compute attention of each segment of a row to its path. Returns: [1, T, heads, D] of each segment."""
    paths = _paths(parents)
    lengths = [query.shape[2] for query in queries]
    # Tokens before each segment; behind a window only those that its first token sees.
    past = [sum(lengths[place] for place in path[:-1]) for path in paths]
    past = past if sliding_window is None else [min(each, sliding_window - 1) for each in past]
    # After a few tokens many: queries for the few too, whose outcome is left out, need no mask, under which the kernel
    # would compute all pairs of the many.
    is_long = [
        length >= 4 * before and (sliding_window is None or before + length <= sliding_window)
        for length, before in zip(lengths, past, strict=True)
    ]
    masked = [place for place, path in enumerate(paths) if len(path) > 1 and not is_long[place]]
    longest, deepest = (max((sizes[place] for place in masked), default=0) for sizes in (lengths, past))
    attended = []
    for place, (query, path, length, before) in enumerate(zip(queries, paths, lengths, past, strict=True)):
        if len(path) == 1:
            attended.append(_attend(module, query, keys[place], values[place], sliding_window, **kwargs))
            continue
        joined = (torch.cat([parts[each] for each in path], dim=2) for parts in (keys, values))
        key, value = (tensor[:, :, -(before + length) :] for tensor in joined)
        if is_long[place]:
            padded = F.pad(query, (0, 0, before, 0))
            attended.append(_attend(module, padded, key, value, None, **kwargs)[:, before:])
            continue
        mask = mask_maker(sliding_window)(longest, deepest, query.dtype, query.device)
        mask = mask[:length, deepest - before : deepest + length]
        if query.is_cuda:  # no fused kernel shares heads under a mask there; transformers' function repeats them
            attended.append(sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0])
        else:
            scale = kwargs["scaling"]
            out = F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
            attended.append(out.transpose(1, 2))
    return attended


@functools.lru_cache(maxsize=64)
def _paths(parents: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return each segment's ancestors, the root first, and itself, by their places in the row."""
    paths = list[tuple[int, ...]]()
    for place, parent in enumerate(parents):
        paths.append((*(paths[parent] if parent >= 0 else ()), place))
    return tuple(paths)


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: RowLengths | None,
    parents: RowParents | None,
    sliding_window: int | None,
    scaling: float,
) -> Tensor:
    """Run flash attention over all segments at once (half precision on GPUs only). Returns: [R, L, heads, D].

    It aligns causality and windows to the last key of each segment.
    """
    rows, _, length, _ = query.shape
    of_queries = lengths or ((length,),) * rows
    of_keys = of_queries if parents is None else _path_lengths(of_queries, parents)
    boundaries, key_boundaries = (_boundaries(each, query.device) for each in (of_queries, of_keys))
    longest, longest_key = (max(max(row) for row in each) for each in (of_queries, of_keys))
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [R * L, heads, D]
    if parents is not None:
        k, v = (_along_paths(tensor, of_queries, parents) for tensor in (k, v))
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # tokens before and after the query
    attended = varlen_attn(
        q, k, v, boundaries, key_boundaries, longest, longest_key, scale=scaling, window_size=window, **SHARED_HEADS
    )
    return cast(Tensor, attended).view(rows, length, -1, query.shape[-1])


@functools.lru_cache(maxsize=8)
def _longest_path(lengths: RowLengths, parents: RowParents | None) -> int:
    """Return the tokens of the longest path; the same in every layer."""
    return max(max(row) for row in (lengths if parents is None else _path_lengths(lengths, parents)))


def _path_lengths(lengths: RowLengths, parents: RowParents) -> RowLengths:
    """Return the tokens of each segment's path."""
    pairs = zip(lengths, parents, strict=True)
    return tuple(tuple(sum(row[place] for place in path) for path in _paths(of_row)) for row, of_row in pairs)


def _along_paths(tensor: Tensor, lengths: RowLengths, parents: RowParents) -> Tensor:
    """Join the tokens of all paths, [R * L, heads, D] to [K, heads, D].

    By parts, as the gradient of an index adds up in an order that changes from run to run on a GPU.
    """
    parts = iter(tensor.split([length for row in lengths for length in row]))
    of_rows = [[next(parts) for _ in row] for row in lengths]
    pairs = zip(of_rows, parents, strict=True)
    return torch.cat([row[place] for row, of_row in pairs for path in _paths(of_row) for place in path])


@functools.lru_cache(maxsize=8)
def _boundaries(lengths: RowLengths, device: torch.device) -> Tensor:
    """Return int32[samples + 1], the cumulative lengths of the samples over all rows; the same in every layer."""
    ends = itertools.accumulate(length for row in lengths for length in row)
    return on_device(torch.tensor([0, *ends], dtype=torch.int32), device)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None, **kwargs: Any
) -> Tensor:
    """Compute causal attention within each row. Returns: [rows, T, heads, D]."""
    length, mask = query.shape[2], None
    if sliding_window is not None and length > sliding_window:
        positions = torch.arange(length, device=query.device)
        distance = positions[:, None] - positions
        mask = (distance >= 0) & (distance < sliding_window)  # bool[T, T]
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]


AttentionInterface.register(NAME, packed_attention)
