"""Add up the numbers that a loss reports over micro-batches, mini-batches and ranks.

The key decides the reduction: one that ends in `_max` holds a maximum, every other a sum. Means are computed once,
where the global denominator is known. All values are detached float64[] tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def is_maximum(key: str) -> bool:
    """Return True if the values under this key reduce by maximum, False if by sum."""
    return key.endswith("_max")


def merge_sums(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add up two reports: maxima of keys `*_max`, sums of all others; a key that one of them lacks is kept.

    Args:
        first: name to float64[].
        second: name to float64[].
    Returns: name to float64[].
    """
    merged = dict(first)
    for key, value in second.items():
        if key not in merged:
            merged[key] = value
        else:
            merged[key] = torch.maximum(merged[key], value) if is_maximum(key) else merged[key] + value
    return merged
