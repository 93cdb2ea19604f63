"""Samples -> each dp rank's micro-batches, in the shape that batch.py fixes.

Packed: a micro-batch is one row of several samples, without padding. One sample per row: R rows, padded to the longest.
R rows, L tokens of a row, T tokens of a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coati_rl.batch import MicroBatch
from coati_rl.data.balance import share_out
from coati_rl.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One prompt with one response, token by token; all arrays are [T] over prompt and response."""

    uid: str  # of the prompt
    number: int  # of the response among the prompt's, from 0
    token_ids: np.ndarray  # int64[T]
    loss_mask: np.ndarray  # bool[T]
    loss_weights: np.ndarray  # float32[T]
    advantages: np.ndarray  # float32[T]
    rollout_logprobs: np.ndarray  # float32[T]
    temperature: np.ndarray  # float32[T]
    policy_version: np.ndarray  # int32[T]

    def __len__(self) -> int:
        return len(self.token_ids)


# What padding holds, by array; see batch.py.
_PADDING = {
    "token_ids": 0,
    "loss_mask": False,
    "loss_weights": 0.0,
    "advantages": 0.0,
    "rollout_logprobs": 0.0,
    "temperature": 1.0,
    "policy_version": -1,
}
_Row = list[tuple[int, Sample]]  # samples with their index in the rank's share


def pack(
    samples: Sequence[Sample],
    *,
    num_ranks: int = 1,
    max_samples: int,
    max_tokens: int | None = None,
    one_sample_per_row: bool = False,
) -> list[tuple[MicroBatch, ...]]:
    """The ranks' micro-batches, equally many for each; which sample is where depends on lengths and order alone.

    Args:
        samples: of all ranks.
        num_ranks: data-parallel ranks that share the samples.
        max_samples: per micro-batch.
        max_tokens: per micro-batch, padding included; None for no limit.
        one_sample_per_row: a padded row for each sample instead of one row for all.
    Raises: RunError if a sample alone exceeds `max_tokens`.
    """
    _check_fit(samples, max_tokens)
    shares = share_out(
        [len(sample) for sample in samples],
        num_ranks=num_ranks,
        max_samples=max_samples,
        max_tokens=max_tokens,
        one_sample_per_row=one_sample_per_row,
    )
    return [_pack_share(samples, share, one_sample_per_row=one_sample_per_row) for share in shares]


def blank_micro_batch() -> MicroBatch:
    """One row that counts no token: its gradient is zero in every parameter.

    For a rank that has fewer samples than micro-batches: ranks compute together, so it needs one.
    """
    shape = (1, 2)
    zeros = np.zeros(shape, dtype=np.float32)
    return MicroBatch(
        token_ids=np.zeros(shape, dtype=np.int64),
        position_ids=np.array([[0, 1]], dtype=np.int64),
        sample_index=np.full(shape, -1, dtype=np.int32),
        loss_mask=np.zeros(shape, dtype=bool),
        loss_weights=zeros,
        advantages=zeros,
        rollout_logprobs=zeros,
        temperature=np.ones(shape, dtype=np.float32),
        policy_version=np.full(shape, -1, dtype=np.int32),
        old_logprobs=zeros,
        ref_logprobs=zeros,
    )


def probe_micro_batch(token_ids: Sequence[int]) -> MicroBatch:
    """One row whose log-probabilities are asked for, at temperature 1: of every token but the first."""
    shape = (1, len(token_ids))
    zeros = np.zeros(shape, dtype=np.float32)
    return MicroBatch(
        token_ids=np.array([token_ids], dtype=np.int64),
        position_ids=np.arange(len(token_ids), dtype=np.int64)[None],
        sample_index=np.zeros(shape, dtype=np.int32),
        loss_mask=np.arange(len(token_ids))[None] > 0,
        loss_weights=zeros,
        advantages=zeros,
        rollout_logprobs=zeros,
        temperature=np.ones(shape, dtype=np.float32),
        policy_version=np.full(shape, -1, dtype=np.int32),
    )


def _check_fit(samples: Sequence[Sample], max_tokens: int | None) -> None:
    longest = max(samples, key=len, default=None)
    if max_tokens is not None and longest is not None and len(longest) > max_tokens:
        raise RunError(
            f"prompt {longest.uid}, sample {longest.number}: {len(longest)} tokens exceed "
            f"--max-tokens-per-microbatch {max_tokens}; use {len(longest)} or more, or a smaller -mnt"
        )


def _pack_share(
    samples: Sequence[Sample], share: Sequence[Sequence[int]], *, one_sample_per_row: bool
) -> tuple[MicroBatch, ...]:
    """A rank's micro-batches; its samples are numbered in the order of `samples`."""
    index_of = {index: place for place, index in enumerate(sorted(index for bin_ in share for index in bin_))}
    micro_batches = []
    for bin_ in share:
        row = [(index_of[index], samples[index]) for index in bin_]
        rows = [[indexed] for indexed in row] if one_sample_per_row else [row]
        micro_batches.append(_make_rows(rows) if row else blank_micro_batch())
    return tuple(micro_batches)


def _make_rows(rows: Sequence[_Row]) -> MicroBatch:
    """Each row's samples one after another, then padding up to the longest row."""
    num_rows, length = len(rows), max(sum(len(sample) for _, sample in row) for row in rows)
    positions = np.empty((num_rows, length), dtype=np.int64)
    sample_index = np.full((num_rows, length), -1, dtype=np.int32)
    # Made once and written to once: at 64 samples a step, joining arrays would take longer than all else here.
    arrays = {
        name: np.full((num_rows, length), fill, dtype=getattr(rows[0][0][1], name).dtype)
        for name, fill in _PADDING.items()
    }
    for number, row in enumerate(rows):
        start = 0
        for index, sample in row:
            place = (number, slice(start, start + len(sample)))
            for name, array in arrays.items():
                array[place] = getattr(sample, name)
            positions[place] = np.arange(len(sample))
            sample_index[place] = index
            start += len(sample)
        positions[number, start:] = np.arange(length - start)
    return MicroBatch(position_ids=positions, sample_index=sample_index, **arrays)
