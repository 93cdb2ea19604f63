"""Pack samples into the rows of micro-batches, as batch.py defines them.

The coordinator plans which sample goes into which micro-batch of which rank (`plan_batches`); each trainer lays out
its own (`build_mini_batch`). Packed: a micro-batch is one row of several samples, without padding. One sample per row:
R rows, padded to the longest. R rows, L tokens of a row, M loss tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from coati_rl.batch import PADDING, MicroBatch, MiniBatch
from coati_rl.data.balance import assign_to_bins
from coati_rl.errors import RunError
from coati_rl.run_lengths import slices
from coati_rl.samples import RaggedBatch, RaggedSamples, Sample, SplitSamples

# The loss arrays of every micro-batch, and those of one that counts no token, where no sample says which there are.
_LOSS_ARRAYS: Mapping[str, DTypeLike] = {
    "token_ids": np.int64,
    "sources": np.int64,
    "loss_mask": np.bool_,
    "sample_index": np.int32,
}
_BLANK_ARRAYS: Mapping[str, DTypeLike] = {
    **_LOSS_ARRAYS,
    "loss_weights": np.float32,
    "advantages": np.float32,
    "rollout_logprobs": np.float32,
    "temperature": np.float32,
    "policy_version": np.int32,
    "old_logprobs": np.float32,
    "ref_logprobs": np.float32,
    "label": np.float32,
    "kl_estimate": np.float32,
}

_ALIGNMENT = 64  # bytes

_Grid = Sequence[Sequence[int]]  # the samples in each row of a micro-batch, by their index in the rank's mini-batch
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
    lengths = [len(sample) for sample in samples]
    tokens = [_num_tokens(lengths[each.start : each.stop], is_padded=one_sample_per_row) for each in units]
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
    return [build_micro_batches(ragged, plan, one_sample_per_row=one_sample_per_row) for ragged, plan in ranks]


def build_mini_batch(batch: RaggedBatch) -> MiniBatch:
    """Build the micro-batches of a rank's part of a mini-batch."""
    parts = ((batch.samples, batch.plan), (batch.measured_samples, batch.measured_plan))
    built = [build_micro_batches(*part, one_sample_per_row=batch.one_sample_per_row) for part in parts]
    return MiniBatch(
        step=batch.step,
        micro_batches=tuple(micro_batch for each in built for micro_batch in each),
        is_last=batch.is_last,
        loss_scale=batch.loss_scale,
        learning_rate_progress=batch.learning_rate_progress,
    )


def build_micro_batches(
    samples: RaggedSamples, plan: Sequence[Sequence[int]], *, one_sample_per_row: bool = False
) -> tuple[MicroBatch, ...]:
    """Build the micro-batches of a plan; one without samples is blank."""
    grids = [[[index] for index in bin_] if one_sample_per_row else [bin_] for bin_ in plan if bin_]
    laid_out = iter(_lay_out(samples.split(), grids) if grids else ())
    return tuple(next(laid_out) if bin_ else blank_micro_batch() for bin_ in plan)


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
        loss_arrays=arrays,
    )


def probe_micro_batch(token_ids: Sequence[int]) -> MicroBatch:
    """Return one row whose tokens after the first are scored at temperature 1."""
    ids = np.array(token_ids)
    mask = np.arange(len(ids)) > 0
    sample = Sample(
        uid="probe", number=0, prefix_ids=ids[:0], token_ids=ids, loss_mask=mask, arrays={"temperature": 1.0}
    )
    return _lay_out(RaggedSamples.of([sample]).split(), [[[0]]])[0]


def _num_tokens(lengths: Sequence[int], *, is_padded: bool) -> int:
    """Count the tokens that a forward computes for a unit of such samples; if padded, with a row per sample."""
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


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of all micro-batches, which an array holds one after another, padding included."""

    shapes: Sequence[tuple[int, int]]  # of each micro-batch: its rows, and the length of each

    @classmethod
    def of(cls, grids: Sequence[_Grid], sizes: Sequence[int], *, smallest: int = 0) -> "_Rows":
        """Rows for samples of these sizes, in each micro-batch as long as its longest, or `smallest`."""
        longest = [max(sum(sizes[index] for index in row) for row in grid) for grid in grids]
        return cls([(len(grid), max(smallest, length)) for grid, length in zip(grids, longest, strict=True)])

    @property
    def lengths(self) -> list[int]:
        """Of each row."""
        return [length for num_rows, length in self.shapes for _ in range(num_rows)]

    def cut(self, arrays: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Each micro-batch's parts of arrays of all, as [rows, length]."""
        parts = slices(num_rows * length for num_rows, length in self.shapes)
        if all(num_rows == 1 for num_rows, _ in self.shapes):
            return [[array[np.newaxis, part] for array in arrays] for part in parts]
        pairs = [*zip(self.shapes, parts, strict=True)]
        return [[array[part].reshape(shape) for array in arrays] for shape, part in pairs]


def _lay_out(samples: SplitSamples, grids: Sequence[_Grid]) -> list[MicroBatch]:
    """Lay out micro-batches that have samples: each row's one after another, then padding up to the longest row.

    Each array is written for all micro-batches at once: they are so small that a call for each takes longer.
    """
    tokens = _Rows.of(grids, samples.lengths)
    loss = _Rows.of(grids, samples.num_loss_tokens, smallest=1)  # a loss cannot take a maximum over nothing
    dtypes = {**_LOSS_ARRAYS, **{name: parts[0].dtype for name, parts in samples.arrays.items()}}
    num_tokens, num_loss = sum(tokens.lengths), sum(loss.lengths)
    sizes = [(num_tokens, np.int64), (num_tokens, np.int64), *((num_loss, dtype) for dtype in dtypes.values())]
    token_ids, position_ids, *allocated = _allocate(sizes)
    arrays = dict(zip(dtypes, allocated, strict=True))
    rows = [row for grid in grids for row in grid]
    is_loss = _write_tokens(samples, rows, tokens.lengths, token_ids=token_ids, position_ids=position_ids)
    _write_loss(samples, rows, tokens, loss, token_ids, np.flatnonzero(is_loss), arrays)
    cut = zip(grids, tokens.cut([token_ids, position_ids]), loss.cut(allocated), strict=True)
    return [
        MicroBatch(
            token_ids=ids,
            position_ids=positions,
            segments=_segments(grid, samples.lengths),
            loss_arrays=dict(zip(arrays, loss_arrays, strict=True)),
        )
        for grid, (ids, positions), loss_arrays in cut
    ]


def _allocate(sizes: Sequence[tuple[int, DTypeLike]]) -> list[np.ndarray]:
    """Make arrays of so many entries of these dtypes, in one piece of memory.

    Many small ones go back to the system with each batch, and to get fresh pages takes longer than to fill them.
    """
    num_bytes = [size * np.dtype(dtype).itemsize for size, dtype in sizes]
    starts = [0, *accumulate(-(-each // _ALIGNMENT) * _ALIGNMENT for each in num_bytes)]
    memory = np.empty(starts[-1], dtype=np.uint8)
    return [np.ndarray(size, dtype, memory, start) for (size, dtype), start in zip(sizes, starts[:-1], strict=True)]


def _segments(grid: _Grid, lengths: Sequence[int]) -> np.ndarray:
    """int32[K, 4], as `MicroBatch` has them: every sample is one."""
    segments = []
    for number, row in enumerate(grid):
        ends = accumulate(lengths[index] for index in row)
        segments += [(number, end - lengths[index], lengths[index], -1) for index, end in zip(row, ends, strict=True)]
    return np.array(segments, dtype=np.int32)


def _write_tokens(
    samples: SplitSamples,
    rows: _Grid,
    lengths: Sequence[int],
    *,
    token_ids: np.ndarray,
    position_ids: np.ndarray,
) -> np.ndarray:
    """Write what a model reads of rows of these lengths. Returns: bool, True on the tokens that the loss reads."""
    counting, nothing = np.arange(max(lengths)), np.zeros(max(lengths), dtype=bool)
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    for row, length in zip(rows, lengths, strict=True):
        sample_lengths = [samples.lengths[index] for index in row]
        for index in row:
            ids += samples.prefix_ids[index], samples.token_ids[index]
            masks += nothing[: len(samples.prefix_ids[index])], samples.loss_masks[index]
        padding = length - sum(sample_lengths)
        ids.append(nothing[:padding])
        masks.append(nothing[:padding])
        positions += [counting[:each] for each in (*sample_lengths, padding)]
    np.concatenate(ids, out=token_ids)
    np.concatenate(positions, out=position_ids)
    return np.concatenate(masks)


def _write_loss(
    samples: SplitSamples,
    rows: _Grid,
    tokens: _Rows,
    loss: _Rows,
    token_ids: np.ndarray,
    places: np.ndarray,
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Write the loss arrays of all rows; `places`: int[N], where their loss tokens are in `token_ids`."""
    counts = samples.num_loss_tokens
    in_row = [sum(counts[index] for index in row) for row in rows]
    runs = [run for count, length in zip(in_row, loss.lengths, strict=True) for run in (count, length - count)]
    loss_mask = arrays["loss_mask"]
    loss_mask[:] = np.repeat(np.tile([True, False], len(rows)), runs)
    starts = np.cumsum([0, *tokens.lengths[:-1]])
    held = [index for row in rows for index in row]
    in_sample = [counts[index] for index in held]
    is_full = len(places) == len(loss_mask)  # without padding; then written in place
    out = {name: array if is_full else np.empty(len(places), array.dtype) for name, array in arrays.items()}
    np.take(token_ids, places, out=out["token_ids"], mode="clip")  # unlike the default, without a copy
    np.subtract(places, np.repeat(starts + 1, in_row), out=out["sources"])
    out["sample_index"][:] = np.repeat(held, in_sample)
    for name, parts in samples.arrays.items():
        if isinstance(parts, np.ndarray):
            out[name][:] = np.repeat(parts[held], in_sample)
        else:
            np.concatenate([parts[index] for index in held], out=out[name])
    for name, array in arrays.items():
        if not is_full and name != "loss_mask":
            array.fill(PADDING.get(name, 0))
            array[loss_mask] = out[name]
