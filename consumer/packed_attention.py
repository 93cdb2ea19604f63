"""Attend within each sample of a packed row: no mask, and no work on pairs of tokens that may not see each other.

Under a block-diagonal mask a row costs as much as one sample of the row's length, in time and, for the mask, in memory.
Here each sample of a row attends on its own, through transformers' SDPA function; at 16 samples of 80 tokens a training
step is 2.4 times as fast. In half precision on a GPU flash attention's varlen kernel takes all samples at once.
R rows, L tokens per row, T tokens of a sample, D size of a head.
"""

import functools
import inspect
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "packed_sdpa"  # as transformers knows it
HALF = (torch.bfloat16, torch.float16)
# PyTorch 2.11's shares the heads of keys and values unasked.
_SHARED_HEADS: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

# Architectures whose attention asks for no more than `packed_attention` does; a test compares each with its own. Others
# (with logit caps, sinks, position biases) go through transformers' masks, which it derives from position_ids.
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})

RowLengths = tuple[tuple[int, ...], ...]  # for each row, the tokens of its samples and of its padding; they add up to L


def row_lengths(position_ids: NDArray[np.int64], sample_index: NDArray[np.int32]) -> RowLengths | None:
    """Return where the samples of each row end.

    Args:
        position_ids: int64[R, L], restarting at 0 with every sample and with the padding.
        sample_index: int32[R, L], -1 on padding.
    Returns: None if no row holds more than one sample: causal attention over whole rows is enough then, since padding
        comes last.
    """
    starts = position_ids == 0
    if ((starts & (sample_index >= 0)).sum(axis=1) <= 1).all():
        return None
    return tuple(tuple(np.diff([*np.flatnonzero(row), len(row)]).tolist()) for row in starts)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    lengths: RowLengths | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend in packed rows; the model calls this instead of its own attention.

    Args:
        module: the layer's attention.
        query: [R, heads, L, D]; key and value likewise, perhaps with fewer heads.
        attention_mask: None; transformers makes no mask for an attention function that it does not know.
        lengths: see `row_lengths`.
        sliding_window: tokens that one sees, itself included; None for all before it.
        kwargs: scaling and dropout, for transformers' function.
    Returns: ([R, L, heads, D], None).
    """
    if query.is_cuda and query.dtype in HALF:
        return _attend_varlen(query, key, value, lengths, sliding_window, kwargs["scaling"]), None
    if lengths is None:
        return _attend(module, query, key, value, sliding_window, **kwargs), None
    rows = []
    for r, row in enumerate(lengths):
        parts = [tensor[r : r + 1].split(row, dim=2) for tensor in (query, key, value)]
        samples = [_attend(module, q, k, v, sliding_window, **kwargs) for q, k, v in zip(*parts, strict=True)]
        rows.append(torch.cat(samples, dim=1))
    return torch.cat(rows), None


def _attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: RowLengths | None,
    sliding_window: int | None,
    scaling: float,
) -> Tensor:
    """[R, L, heads, D]: flash attention over all samples at once; it takes half precision on GPUs only."""
    rows, _, length, _ = query.shape
    samples = lengths or ((length,),) * rows
    boundaries = _boundaries(samples, query.device)
    longest = max(max(row) for row in samples)
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))  # [R * L, heads, D]
    window = (-1 if sliding_window is None else sliding_window - 1, 0)  # tokens before and after one's own
    attended = varlen_attn(
        q, k, v, boundaries, boundaries, longest, longest, scale=scaling, window_size=window, **_SHARED_HEADS
    )
    return cast(Tensor, attended).view(rows, length, -1, query.shape[-1])


@functools.lru_cache(maxsize=4)
def _boundaries(lengths: RowLengths, device: torch.device) -> Tensor:
    """int32[samples + 1]: where each begins and ends in all rows one after another; the same in every layer."""
    flat = torch.tensor([0, *(length for row in lengths for length in row)], dtype=torch.int32, device=device)
    return flat.cumsum(0, dtype=torch.int32)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None, **kwargs: Any
) -> Tensor:
    """[rows, T, heads, D]: causal attention within each row."""
    length, mask = query.shape[2], None
    if sliding_window is not None and length > sliding_window:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place
        mask = (distance >= 0) & (distance < sliding_window)  # bool[T, T]
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]


AttentionInterface.register(NAME, packed_attention)
