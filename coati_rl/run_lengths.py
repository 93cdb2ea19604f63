"""Run-length encode arrays whose values rarely change, as (value, length) pairs, and decode them."""

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

Runs = tuple[tuple[Any, int], ...]  # of plain Python values, so that they can be JSON


def slices(lengths: Iterable[int]) -> list[slice]:
    """Return the slices of consecutive parts with these lengths."""
    ends = [*accumulate(lengths, initial=0)]
    return [slice(start, end) for start, end in pairwise(ends)]


def count_runs(values: np.ndarray) -> int:
    """Count the runs of a one-dimensional array, which is much cheaper than encoding many."""
    return int(np.count_nonzero(values[1:] != values[:-1])) + 1 if len(values) else 0


def encode_runs(values: np.ndarray) -> Runs:
    """Encode a one-dimensional array as its runs, in order."""
    if len(values) and (values == values[0]).all():  # the most frequent case, and much faster
        return ((values[0].item(), len(values)),)
    starts = np.flatnonzero(np.append(len(values) > 0, values[1:] != values[:-1]))
    lengths = np.diff(np.append(starts, len(values)))
    return tuple(zip(values[starts].tolist(), lengths.tolist(), strict=True))


def decode_runs(runs: Sequence[Sequence[Any]], dtype: DTypeLike) -> np.ndarray:
    """Decode the runs of `encode_runs`; a single run gives a read-only array that needs no memory."""
    if len(runs) == 1:
        ((value, length),) = runs
        array = np.ndarray(length, dtype, np.array([value], dtype=dtype), strides=(0,))  # as broadcast_to, but faster
        array.flags.writeable = False
        return array
    lengths = np.array([length for _, length in runs], dtype=np.int64)
    return np.repeat(np.array([value for value, _ in runs], dtype=dtype), lengths)
