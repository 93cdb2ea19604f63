"""The numbers a loss reports, as sums that add up over micro-batches, mini-batches and ranks.

The reduction is in the name: a key that ends in `_max` holds a maximum, every other key a sum. Means are formed once,
by whoever knows the global denominator. All values are detached float64[] tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor


def is_maximum(key: str) -> bool:
    """True if the values under this key reduce by maximum, False if by sum."""
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
