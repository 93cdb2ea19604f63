"""Hold what attention within samples needs of torch's kernels: a mask aligned to the last key, and shared heads."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

HALF = (torch.bfloat16, torch.float16)
# PyTorch 2.11's varlen_attn shares key and value heads without this argument.
SHARED_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


@functools.cache
def mask_maker(window: int | None) -> Callable[[int, int, torch.dtype, torch.device], Tensor]:
    """Return `lower_right` of a window; it keeps its last mask, that of the other layers of a micro-batch."""
    return functools.lru_cache(maxsize=1)(functools.partial(lower_right, window))


def lower_right(window: int | None, length: int, past: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the additive mask [T, P + T] of T queries behind P tokens.

    That of t queries behind p tokens are its first t rows, and its columns from P - p to P + t.
    """
    distance = torch.arange(past, past + length, device=device)[:, None] - torch.arange(past + length, device=device)
    is_hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return torch.zeros(distance.shape, dtype=dtype, device=device).masked_fill_(is_hidden, -torch.inf)
