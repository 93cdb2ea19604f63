"""Samples -> micro-batches of at most `max_samples` samples, each one packed row in the shape that batch.py fixes.

R rows (1 here), L tokens of a row.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coati_rl.batch import MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One prompt with one response, token by token; all arrays are [T] over prompt and response."""

    token_ids: np.ndarray  # int64[T]
    loss_mask: np.ndarray  # bool[T]
    loss_weights: np.ndarray  # float32[T]
    advantages: np.ndarray  # float32[T]
    rollout_logprobs: np.ndarray  # float32[T]
    temperature: np.ndarray  # float32[T]
    policy_version: np.ndarray  # int32[T]

    def __len__(self) -> int:
        return len(self.token_ids)


_PER_TOKEN = tuple(name for name in Sample.__slots__)


def pack(samples: Sequence[Sample], *, max_samples: int) -> tuple[MicroBatch, ...]:
    """Cut samples into equally many micro-batches as `max_samples` asks for, each a single row without padding.

    Samples of like length are spread, longest first to the lightest micro-batch, so that the largest row stays small.
    """
    num_rows = -(-len(samples) // max_samples)
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    tokens = [0] * num_rows
    for index in sorted(range(len(samples)), key=lambda i: -len(samples[i])):
        row = min((r for r in range(num_rows) if len(rows[r]) < max_samples), key=lambda r: tokens[r])
        rows[row].append(index)
        tokens[row] += len(samples[index])
    return tuple(_make_row([(index, samples[index]) for index in row]) for row in rows)


def _make_row(indexed: Sequence[tuple[int, Sample]]) -> MicroBatch:
    samples = [sample for _, sample in indexed]
    per_token = {name: np.concatenate([getattr(s, name) for s in samples])[None] for name in _PER_TOKEN}
    return MicroBatch(
        position_ids=np.concatenate([np.arange(len(s), dtype=np.int64) for s in samples])[None],
        sample_index=np.concatenate([np.full(len(s), index, dtype=np.int32) for index, s in indexed])[None],
        **per_token,
    )
