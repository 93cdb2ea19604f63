"""Encode arrays whose values rarely change as runs, (value, how often in a row), and decode them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

Runs = tuple[tuple[Any, int], ...]  # of plain Python values, so that they may be JSON


def count_runs(values: np.ndarray) -> int:
    """Count the runs of an array of one dimension, which is much cheaper than to encode many."""
    return int(np.count_nonzero(values[1:] != values[:-1])) + 1 if len(values) else 0


def encode_runs(values: np.ndarray) -> Runs:
    """Shorten an array of one dimension to its runs, in order."""
    if len(values) and (values == values[0]).all():  # as almost always, and then much faster
        return ((values[0].item(), len(values)),)
    starts = np.flatnonzero(np.append(len(values) > 0, values[1:] != values[:-1]))
    lengths = np.diff(np.append(starts, len(values)))
    return tuple(zip(values[starts].tolist(), lengths.tolist(), strict=True))


def decode_runs(runs: Sequence[Sequence[Any]], dtype: DTypeLike) -> np.ndarray:
    """The inverse of `encode_runs`; read-only, and of no size in memory, if there is one run."""
    if len(runs) == 1:
        ((value, length),) = runs
        array = np.ndarray(length, dtype, np.array([value], dtype=dtype), strides=(0,))  # as broadcast_to, but faster
        array.flags.writeable = False
        return array
    lengths = np.array([length for _, length in runs], dtype=np.int64)
    return np.repeat(np.array([value for value, _ in runs], dtype=dtype), lengths)
