"""Samples -> each dp rank's micro-batches, in the shape that batch.py fixes.

Packed: a micro-batch is one row of several samples, without padding. One sample per row: R rows, padded to the longest.
R rows, L tokens of a row, P tokens of a prompt, T tokens of a response.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coati_rl.batch import MicroBatch
from coati_rl.data.balance import share_out
from coati_rl.errors import RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One prompt with one response, all tokens of which are in the loss."""

    uid: str  # of the prompt
    number: int  # of the response among the prompt's, from 0
    prompt_ids: np.ndarray  # int[P]
    response_ids: np.ndarray  # int[T]
    loss_weight: float  # of each response token
    advantage: float
    rollout_logprobs: np.ndarray  # float32[T]
    temperature: float
    policy_versions: np.ndarray  # int32[T]

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


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
    shape = len(rows), max(sum(len(sample) for _, sample in row) for row in rows)
    # Made once, as what they hold where there is no response, and written to once: at 64 samples a step, joining arrays
    # would take longer than all else here.
    micro_batch = MicroBatch(
        token_ids=np.zeros(shape, dtype=np.int64),
        position_ids=np.empty(shape, dtype=np.int64),
        sample_index=np.full(shape, -1, dtype=np.int32),
        loss_mask=np.zeros(shape, dtype=bool),
        loss_weights=np.zeros(shape, dtype=np.float32),
        advantages=np.zeros(shape, dtype=np.float32),
        rollout_logprobs=np.zeros(shape, dtype=np.float32),
        temperature=np.ones(shape, dtype=np.float32),
        policy_version=np.full(shape, -1, dtype=np.int32),
    )
    for number, row in enumerate(rows):
        start = 0
        for index, sample in row:
            _write(sample, index, micro_batch, row=number, start=start)
            start += len(sample)
        micro_batch.position_ids[number, start:] = np.arange(shape[1] - start)
    return micro_batch


def _write(sample: Sample, index: int, micro_batch: MicroBatch, *, row: int, start: int) -> None:
    """A sample's tokens from `start` of a row on."""
    middle, end = start + len(sample.prompt_ids), start + len(sample)
    response = row, slice(middle, end)
    micro_batch.position_ids[row, start:end] = np.arange(len(sample))
    micro_batch.sample_index[row, start:end] = index
    micro_batch.token_ids[row, start:middle] = sample.prompt_ids
    micro_batch.token_ids[response] = sample.response_ids
    micro_batch.loss_mask[response] = True
    micro_batch.loss_weights[response] = sample.loss_weight
    micro_batch.advantages[response] = sample.advantage
    micro_batch.rollout_logprobs[response] = sample.rollout_logprobs
    micro_batch.temperature[response] = sample.temperature
    micro_batch.policy_version[response] = sample.policy_versions
