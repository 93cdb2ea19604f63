"""Attention over packed rows, a sample at a time: no mask, and no work on pairs of tokens that may not see each other.

A dense block-diagonal mask makes attention cost as much as one sample of the row's length. Here each sample of a row
attends on its own through transformers' SDPA function. R rows, L tokens per row, T tokens of a sample.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "packed_sdpa"

# Architectures whose attention asks for nothing but what `packed_attention` does; a test compares each with its own.
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

RowLengths = tuple[tuple[int, ...], ...]  # per row, tokens of each sample in order; they add up to L, padding included


def row_lengths(position_ids: NDArray[np.int64]) -> RowLengths | None:
    """Where each row's samples end, from position_ids that restart at 0 with every sample.

    Returns: None where causal attention over whole rows is enough: each has one sample, and at most padding behind it.
    """
    lengths = []
    for row in position_ids:
        starts = np.flatnonzero(row == 0)
        lengths.append(tuple(np.diff([*starts, len(row)]).tolist()))
    return tuple(lengths)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    lengths: RowLengths | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls instead of its own attention.

    Args:
        module: the layer's attention.
        query: [R, heads, L, D]; key and value likewise, with as many heads as the model has for them.
        attention_mask: None always.
        lengths: of the samples in each row; None if no row holds more than one.
        sliding_window: how many tokens, itself included, a token sees; None for all.
        kwargs: scaling, dropout.
    Returns: ([R, L, heads, D], None).
    """
    if lengths is None:
        return _attend(module, query, key, value, sliding_window, **kwargs), None
    rows = []
    for r, row in enumerate(lengths):
        parts = [tensor[r : r + 1].split(row, dim=2) for tensor in (query, key, value)]
        samples = [_attend(module, *qkv, sliding_window, **kwargs) for qkv in zip(*parts, strict=True)]
        rows.append(torch.cat(samples, dim=1))
    return torch.cat(rows), None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, sliding_window: int | None, **kwargs: Any
) -> Tensor:
    """[R, T, heads, D]: causal attention of one sample, or of one per row."""
    length = query.shape[2]
    mask = None
    if sliding_window is not None and length > sliding_window:
        distance = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
        mask = (distance >= 0) & (distance < sliding_window)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]


def samples_only(lengths: Sequence[int]) -> None: ...


AttentionInterface.register(NAME, packed_attention)
