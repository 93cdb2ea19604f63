"""Pack samples into the rows of micro-batches, as batch.py defines them.

The coordinator plans which sample goes into which micro-batch of which rank (`plan_batches`); each trainer lays out
its own (`build_mini_batch`). Packed: a micro-batch is one row of several samples, without padding. One sample per row:
R rows, padded to the longest. R rows, L tokens of a row, M loss tokens of a row.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from coati_rl.batch import PADDING, MicroBatch, MiniBatch
from coati_rl.data.balance import assign_to_bins
from coati_rl.errors import RunError
from coati_rl.samples import RaggedBatch, RaggedSamples, Sample

# Loss arrays of a micro-batch without samples, from which the names would follow.
_BLANK_ARRAYS: Mapping[str, type] = {
    "loss_weights": np.float32,
    "advantages": np.float32,
    "rollout_logprobs": np.float32,
    "temperature": np.float32,
    "policy_version": np.int32,
    "old_logprobs": np.float32,
    "ref_logprobs": np.float32,
}

_Row = Sequence[tuple[int, Sample]]  # samples with their index in the rank's mini-batch
RankSamples = tuple[RaggedSamples, tuple[tuple[int, ...], ...]]  # a rank's samples and the plan of its micro-batches


def plan_batches(
    samples: Sequence[Sample],
    *,
    num_ranks: int = 1,
    max_samples: int,
    max_tokens: int | None = None,
    one_sample_per_row: bool = False,
    unit: int = 1,
) -> list[RankSamples]:
    """Assign samples to micro-batches by their lengths and order alone.

    Args:
        samples: of all ranks.
        num_ranks: data-parallel ranks that share the samples.
        max_samples: per micro-batch.
        max_tokens: per micro-batch, padding included; None for no limit.
        one_sample_per_row: a padded row for each sample instead of one row for all.
        unit: number of consecutive samples that stay together in a micro-batch: 2 for preference pairs.
    Returns: each rank's samples, and the samples in each of its micro-batches, of which all ranks have equally many.
    Raises: RunError if a unit alone exceeds `max_tokens`; ValueError if the samples are not a multiple of the unit.
    """
    if len(samples) % unit or max_samples < unit:
        raise ValueError(f"{len(samples)} samples, {max_samples} a micro-batch, cannot be kept in units of {unit}")
    units = [range(start, start + unit) for start in range(0, len(samples), unit)]
    tokens = [_num_tokens([samples[index] for index in each], is_padded=one_sample_per_row) for each in units]
    _check_fit(samples, units, tokens, max_tokens)
    ranks = assign_to_bins(
        tokens,
        num_ranks=num_ranks,
        max_samples=max_samples // unit,
        max_tokens=max_tokens,
        one_sample_per_row=one_sample_per_row,
    )
    plans = []
    for unit_bins in ranks:
        bins = [[index for number in bin_ for index in units[number]] for bin_ in unit_bins]
        chosen = sorted(index for bin_ in bins for index in bin_)  # in the original order
        position = {index: number for number, index in enumerate(chosen)}
        ragged = RaggedSamples.of([samples[index] for index in chosen])
        plans.append((ragged, tuple(tuple(position[index] for index in bin_) for bin_ in bins)))
    return plans


def pack(samples: Sequence[Sample], *, one_sample_per_row: bool = False, **limits: Any) -> list[tuple[MicroBatch, ...]]:
    """Plan and build micro-batches in one process; see `plan_batches`. Returns: each rank's micro-batches."""
    ranks = plan_batches(samples, one_sample_per_row=one_sample_per_row, **limits)
    return [build_micro_batches(ragged.split(), plan, one_sample_per_row=one_sample_per_row) for ragged, plan in ranks]


def build_mini_batch(batch: RaggedBatch) -> MiniBatch:
    """Build the micro-batches of a rank's part of a mini-batch."""
    return MiniBatch(
        step=batch.step,
        micro_batches=build_micro_batches(
            batch.samples.split(), batch.plan, one_sample_per_row=batch.one_sample_per_row
        ),
        is_last=batch.is_last,
        loss_scale=batch.loss_scale,
        learning_rate_progress=batch.learning_rate_progress,
    )


def build_micro_batches(
    samples: Sequence[Sample], plan: Sequence[Sequence[int]], *, one_sample_per_row: bool = False
) -> tuple[MicroBatch, ...]:
    """Build the micro-batches of a plan; one without samples is blank."""
    micro_batches = []
    for bin_ in plan:
        row = [(index, samples[index]) for index in bin_]
        rows = [[indexed] for indexed in row] if one_sample_per_row else [row]
        micro_batches.append(_make_rows(rows) if row else blank_micro_batch())
    return tuple(micro_batches)


def blank_micro_batch() -> MicroBatch:
    """Return one row without loss tokens, whose gradient is zero in every parameter.

    Ranks compute together: a rank with fewer samples than micro-batches needs it.
    """
    arrays: dict[str, np.ndarray] = {
        name: np.full((1, 1), PADDING.get(name, 0), dtype=dtype) for name, dtype in _BLANK_ARRAYS.items()
    }
    return MicroBatch(
        token_ids=np.zeros((1, 2), dtype=np.int64),
        position_ids=np.array([[0, 1]], dtype=np.int64),
        segments=np.empty((0, 4), dtype=np.int32),
        loss_arrays=_new_loss_arrays((1, 1)) | arrays,
    )


def probe_micro_batch(token_ids: Sequence[int]) -> MicroBatch:
    """Return one row whose tokens after the first are scored at temperature 1."""
    ids = np.array(token_ids)
    mask = np.arange(len(ids)) > 0
    sample = Sample(
        uid="probe", number=0, prefix_ids=ids[:0], token_ids=ids, loss_mask=mask, arrays={"temperature": 1.0}
    )
    return _make_rows([[(0, sample)]])


def _num_tokens(samples: Sequence[Sample], *, is_padded: bool) -> int:
    """Count the tokens that a forward computes for a unit; if padded, with a row per sample."""
    lengths = [len(sample) for sample in samples]
    return len(lengths) * max(lengths) if is_padded else sum(lengths)


def _check_fit(
    samples: Sequence[Sample], units: Sequence[range], tokens: Sequence[int], max_tokens: int | None
) -> None:
    largest = max(range(len(units)), key=tokens.__getitem__, default=None)
    if max_tokens is not None and largest is not None and tokens[largest] > max_tokens:
        first = samples[units[largest][0]]
        raise RunError(
            f"prompt {first.uid}, sample {first.number}: {tokens[largest]} tokens exceed "
            f"--max-tokens-per-microbatch {max_tokens}; use {tokens[largest]} or more, or a smaller -mnt"
        )


def _make_rows(rows: Sequence[_Row]) -> MicroBatch:
    """Concatenate each row's samples, and pad to the longest row."""
    length = max(sum(len(sample) for _, sample in row) for row in rows)
    # A loss cannot take a maximum over no tokens.
    num_loss = max(1, max(sum(sample.num_loss_tokens for _, sample in row) for row in rows))
    token_ids = np.zeros((len(rows), length), dtype=np.int64)
    position_ids = np.empty((len(rows), length), dtype=np.int64)
    counting, no_loss = np.arange(length), np.zeros(length, dtype=bool)
    segments: list[tuple[int, ...]] = []
    arrays = _new_loss_arrays((len(rows), num_loss))
    for name, array in rows[0][0][1].arrays.items():
        dtype = array.dtype if isinstance(array, np.ndarray) else np.float32
        arrays[name] = np.full((len(rows), num_loss), PADDING.get(name, 0), dtype=dtype)
    for number, row in enumerate(rows):
        lengths = [len(sample) for _, sample in row]
        starts = [0, *accumulate(lengths)]
        segments += [(number, *position, -1) for position in zip(starts[:-1], lengths, strict=True)]
        parts = [part for _, sample in row for part in (sample.prefix_ids, sample.token_ids)]
        np.concatenate(parts, out=token_ids[number, : starts[-1]])
        np.concatenate([counting[:each] for each in (*lengths, length - starts[-1])], out=position_ids[number])
        masks = [part for _, sample in row for part in (no_loss[: len(sample.prefix_ids)], sample.loss_mask)]
        _write(arrays, number, row, np.flatnonzero(np.concatenate(masks)), token_ids[number])
    return MicroBatch(
        token_ids=token_ids,
        position_ids=position_ids,
        segments=np.array(segments, dtype=np.int32).reshape(-1, 4),
        loss_arrays=arrays,
    )


def _new_loss_arrays(shape: tuple[int, int]) -> dict[str, np.ndarray]:
    """Return the loss arrays of every micro-batch, all padding."""
    return {
        "token_ids": np.zeros(shape, dtype=np.int64),
        "sources": np.zeros(shape, dtype=np.int64),
        "loss_mask": np.zeros(shape, dtype=bool),
        "sample_index": np.full(shape, -1, dtype=np.int32),
    }


def _write(arrays: dict[str, np.ndarray], number: int, row: _Row, places: np.ndarray, token_ids: np.ndarray) -> None:
    """Write a row's N loss tokens, at places int[N] of its tokens int[L], into loss arrays [R, M]."""
    counts = [sample.num_loss_tokens for _, sample in row]
    where = number, slice(len(places))
    arrays["token_ids"][where] = token_ids[places]
    np.subtract(places, 1, out=arrays["sources"][where])
    arrays["loss_mask"][where] = True
    arrays["sample_index"][where] = np.repeat([index for index, _ in row], counts)
    for name in row[0][1].arrays:
        parts: list[Any] = [sample.arrays[name] for _, sample in row]
        is_dense = isinstance(parts[0], np.ndarray)
        if is_dense:
            np.concatenate(parts, out=arrays[name][where])
        else:
            arrays[name][where] = np.repeat(parts, counts)
