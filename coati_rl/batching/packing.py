"""Pack samples into the rows of micro-batches, as batch.py defines them.

The coordinator plans which sample goes into which micro-batch of which rank (`plan_batches`); each trainer lays out
its own (`build_mini_batch`). Packed: a micro-batch is one row of several samples, without padding, in which tokens of a
common prefix may be there once. One sample per row: R rows, padded to the longest. R rows, L tokens of a row, M loss
tokens of a row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from coati_rl.batch import PADDING, MicroBatch, MiniBatch
from coati_rl.batching.balance import Bins, assign_to_bins
from coati_rl.batching.prefix_groups import Piece, assign_pieces
from coati_rl.batching.rows import LossPlaces, SharedRow, segments_of, write_routes, write_rows, write_shared_rows
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
    "policy_version": np.int32,
    **dict.fromkeys(("loss_weights", "advantages", "rollout_logprobs", "temperature"), np.float32),
    **dict.fromkeys(("old_logprobs", "ref_logprobs", "label", "kl_estimate"), np.float32),
    **dict.fromkeys(("token_rewards", "is_cut"), np.float32),  # a critic's targets read them
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
    shares_prefixes: bool = False,
    num_stages: int = 1,
) -> list[RankSamples]:
    """Assign samples to micro-batches by their lengths, order and common prefixes alone.

    Args:
        samples: of all ranks.
        num_ranks: data-parallel ranks that share the samples.
        max_samples: per micro-batch.
        max_tokens: per micro-batch, padding included, shared tokens once; None for no limit.
        one_sample_per_row: a padded row for each sample instead of one row for all.
        unit: number of consecutive samples that stay together in a micro-batch: 2 for preference pairs.
        shares_prefixes: consecutive samples of one uid, or of one unit, that begin with the same tokens stay together,
            even if they are more than `max_samples`, and these are computed once. Not for padded rows.
        num_stages: of the pipeline; where it would wait, samples that share prefixes are cut into more micro-batches.
    Returns: each rank's samples, and the samples in each of its micro-batches, of which all ranks have equally many.
    Raises: RunError if a unit alone exceeds `max_tokens`; ValueError if the samples are not a multiple of the unit.
    """
    if len(samples) % unit or max_samples < unit:
        raise ValueError(f"{len(samples)} samples, {max_samples} a micro-batch, cannot be kept in units of {unit}")
    if shares_prefixes and not one_sample_per_row:
        pieces, ranks = assign_pieces(
            samples,
            num_ranks=num_ranks,
            max_samples=max_samples,
            max_tokens=max_tokens,
            unit=unit,
            num_stages=num_stages,
        )
        _check_fit(samples, pieces, max_tokens)
        return [_share_of_rank(samples, pieces, bins, is_shared=True) for bins in ranks]
    units = [range(start, start + unit) for start in range(0, len(samples), unit)]
    lengths = [len(sample) for sample in samples]
    pieces = [Piece([*each], _num_tokens([lengths[i] for i in each], is_padded=one_sample_per_row)) for each in units]
    _check_fit(samples, pieces, max_tokens)
    ranks = assign_to_bins(
        [piece.num_tokens for piece in pieces],
        num_ranks=num_ranks,
        max_samples=max_samples // unit,
        max_tokens=max_tokens,
        one_sample_per_row=one_sample_per_row,
    )
    return [_share_of_rank(samples, pieces, bins, is_shared=False) for bins in ranks]


def _share_of_rank(samples: Sequence[Sample], pieces: Sequence[Piece], bins: Bins, *, is_shared: bool) -> RankSamples:
    """Return a rank's samples, in the original order, and the plan of its micro-batches."""
    piece_of = {index: number for bin_ in bins for number in bin_ for index in pieces[number].samples}
    chosen = sorted(piece_of)
    position = {index: number for number, index in enumerate(chosen)}
    ragged = RaggedSamples.of(
        [samples[index] for index in chosen],
        piece_of=np.array([piece_of[index] for index in chosen], dtype=np.int32) if is_shared else None,
    )
    plan = tuple(tuple(position[index] for number in bin_ for index in sorted(pieces[number].samples)) for bin_ in bins)
    return ragged, plan


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


def padded(micro_batches: Sequence[MicroBatch], count: int) -> list[MicroBatch]:
    """Append blank micro-batches up to `count`."""
    return [*micro_batches, *[blank_micro_batch()] * (count - len(micro_batches))]


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


def probe_micro_batch(token_ids: Sequence[int], routes: np.ndarray | None = None) -> MicroBatch:
    """Return one row whose tokens after the first are scored at temperature 1. `routes`: uint[T, D, K], if known."""
    ids = np.array(token_ids)
    mask = np.arange(len(ids)) > 0
    arrays = {"temperature": 1.0}
    sample = Sample(
        uid="probe", number=0, prefix_ids=ids[:0], token_ids=ids, loss_mask=mask, arrays=arrays, routes=routes
    )
    return _lay_out(RaggedSamples.of([sample]).split(), [[[0]]])[0]


def _num_tokens(lengths: Sequence[int], *, is_padded: bool) -> int:
    """Count the tokens that a forward computes for a unit of such samples; if padded, with a row per sample."""
    return len(lengths) * max(lengths) if is_padded else sum(lengths)


def _check_fit(samples: Sequence[Sample], pieces: Sequence[Piece], max_tokens: int | None) -> None:
    largest = max(pieces, key=lambda piece: piece.num_tokens, default=None)
    if max_tokens is not None and largest is not None and largest.num_tokens > max_tokens:
        first = samples[largest.samples[0]]
        raise RunError(
            f"prompt {first.uid}, sample {first.number}: {largest.num_tokens} tokens exceed "
            f"--max-tokens-per-microbatch {max_tokens}; use {largest.num_tokens} or more, or a smaller -mnt"
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of all micro-batches, which an array holds one after another, padding included."""

    shapes: Sequence[tuple[int, int]]  # of each micro-batch: its rows, and the length of each

    @classmethod
    def of(cls, grids: Sequence[_Grid], sizes: Iterable[int], *, smallest: int = 0) -> "_Rows":
        """Rows for contents of these sizes, in each micro-batch as long as its longest, or `smallest`."""
        each = iter(sizes)
        return cls([(len(grid), max(smallest, *(next(each) for _ in grid))) for grid in grids])

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
        return [[array[part].reshape(*shape, *array.shape[1:]) for array in arrays] for shape, part in pairs]


def _lay_out(samples: SplitSamples, grids: Sequence[_Grid]) -> list[MicroBatch]:
    """Lay out micro-batches that have samples: each row's one after another, then padding up to the longest row.

    Each array is written for all micro-batches at once: they are so small that a call for each takes longer.
    """
    rows = [row for grid in grids for row in grid]
    shared = None if samples.piece_of is None else [SharedRow.of(samples, row, samples.piece_of) for row in rows]
    counts = (sum(samples.num_loss_tokens[index] for index in row) for row in rows)
    if shared is None:
        tokens = _Rows.of(grids, (sum(samples.lengths[index] for index in row) for row in rows))
        segments = iter([segments_of(row, samples.lengths) for row in rows])
    else:
        tokens = _Rows.of(grids, (len(row.token_ids) for row in shared))
        segments = iter([row.segments for row in shared])
    loss = _Rows.of(grids, counts, smallest=1)  # a loss cannot take a maximum over nothing
    dtypes = {**_LOSS_ARRAYS, **{name: parts[0].dtype for name, parts in samples.arrays.items()}}
    num_tokens, num_loss = sum(tokens.lengths), sum(loss.lengths)
    sizes = [(num_tokens, np.int64), (num_tokens, np.int64), *((num_loss, dtype) for dtype in dtypes.values())]
    token_ids, position_ids, *allocated = _allocate(sizes)
    arrays = dict(zip(dtypes, allocated, strict=True))
    if shared is None:
        places = write_rows(samples, rows, tokens.lengths, token_ids=token_ids, position_ids=position_ids)
    else:
        places = write_shared_rows(samples, rows, shared, token_ids=token_ids, position_ids=position_ids)
    _write_loss(samples, rows, tokens, loss, token_ids, places, arrays)
    routes = write_routes(samples, rows, shared, tokens.lengths)
    of_tokens = [token_ids, position_ids, *([] if routes is None else [routes])]
    cut = zip(grids, tokens.cut(of_tokens), loss.cut(allocated), strict=True)
    return [
        MicroBatch(
            token_ids=ids,
            position_ids=positions,
            segments=np.array([(r, *each) for r in range(len(grid)) for each in next(segments)], dtype=np.int32),
            loss_arrays=dict(zip(arrays, loss_arrays, strict=True)),
            routes=its_routes[0] if its_routes else None,
        )
        for grid, (ids, positions, *its_routes), loss_arrays in cut
    ]


def _allocate(sizes: Sequence[tuple[int, DTypeLike]]) -> list[np.ndarray]:
    """Make arrays of so many entries of these dtypes, in one piece of memory.

    Many small ones go back to the system with each batch, and to get fresh pages takes longer than to fill them.
    """
    num_bytes = [size * np.dtype(dtype).itemsize for size, dtype in sizes]
    starts = [0, *accumulate(-(-each // _ALIGNMENT) * _ALIGNMENT for each in num_bytes)]
    memory = np.empty(starts[-1], dtype=np.uint8)
    return [np.ndarray(size, dtype, memory, start) for (size, dtype), start in zip(sizes, starts[:-1], strict=True)]


def _write_loss(
    samples: SplitSamples,
    rows: _Grid,
    tokens: _Rows,
    loss: _Rows,
    token_ids: np.ndarray,
    places: LossPlaces,
    arrays: Mapping[str, np.ndarray],
) -> None:
    """Write the loss arrays of all rows."""
    counts = samples.num_loss_tokens
    in_row = [sum(counts[index] for index in row) for row in rows]
    runs = [run for count, length in zip(in_row, loss.lengths, strict=True) for run in (count, length - count)]
    loss_mask = arrays["loss_mask"]
    loss_mask[:] = np.repeat(np.tile([True, False], len(rows)), runs)
    starts = np.cumsum([0, *tokens.lengths[:-1]])
    held = [index for row in rows for index in row]
    in_sample = [counts[index] for index in held]
    is_full = len(places.tokens) == len(loss_mask)  # without padding; then written in place
    out = {name: array if is_full else np.empty(len(places.tokens), array.dtype) for name, array in arrays.items()}
    np.take(token_ids, places.tokens, out=out["token_ids"], mode="clip")  # unlike the default, without a copy
    np.subtract(places.sources, np.repeat(starts, in_row), out=out["sources"])
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
