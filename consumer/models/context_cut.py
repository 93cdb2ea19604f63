"""Cut the rows of a micro-batch over context-parallel ranks, so that each gets as many tokens and about as much work.

A row is padded to chunks of equal length, several for each rank. The work of causal attention grows with a token's
place in its sample; the chunk with the most of it goes first, to the rank with the least so far that still lacks
chunks. With one sample in a row this is the zigzag order: the first chunk goes with the last, the second with the last
but one.

A segment that is cut becomes several, each the parent of the next: what a token sees does not change. All ranks compute
the same cut from the same micro-batch. C context-parallel ranks, R rows, L tokens of a row, l = ceil(L / (2C)) * 2 of a
rank (or slightly more where chunks are smaller), M loss tokens of a row, m of them on one rank at most.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from coati_rl.batch import PADDING, MicroBatch

CHUNKS_PER_RANK = 2  # of short rows; each cut of a sample is another call of attention
MANY_CHUNKS_PER_RANK = 4  # of long rows, in which several samples share out less evenly
LONG_CHUNK = 1024  # tokens, from which a row has many chunks


class OwnPiece(NamedTuple):
    """Say which keys a run of one rank's consecutive tokens of a segment reads, causally, with the last key its own."""

    length: int  # tokens
    ranges: tuple[tuple[int, int], ...]  # [start, end) places in the padded row of its path, itself last

    @property
    def num_keys(self) -> int:
        """Return the tokens of the path, its own included."""
        return sum(end - start for start, end in self.ranges)

    def seen(self, window: int | None) -> tuple[tuple[int, int], ...]:
        """Return the ranges without what is behind the window of every token."""
        hidden = 0 if window is None else max(0, self.num_keys - (self.length + window - 1))
        found = list[tuple[int, int]]()
        for start, end in self.ranges:
            first = min(start + hidden, end)
            hidden -= first - start
            found += [(first, end)] if first < end else []
        return tuple(found)


Pieces = tuple[tuple[OwnPiece, ...], ...]  # of each row, in the order of a rank's tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextCut:
    """Hold which rank has which tokens of a micro-batch; the same on all ranks."""

    places: NDArray[np.int64]  # [C, R, l], of each rank's tokens in the padded row, ascending
    pieces: tuple[Pieces, ...]  # of each rank
    loss_places: NDArray[np.int64]  # [C, R, m], of each rank's loss tokens in R * M; R * M where a rank has fewer
    longest_path: int  # tokens that a token sees at most, padding of the row included

    def local_batch(self, micro_batch: MicroBatch, rank: int) -> MicroBatch:
        """Return a rank's part of a micro-batch: its tokens, and the loss tokens that they predict.

        Its segments are none: `pieces` say what attends to what.
        """
        own, loss = self.places[rank], self.loss_places[rank]
        rows = len(own)
        ids, positions = (self.own_tokens(each, rank) for each in (micro_batch.token_ids, micro_batch.position_ids))
        arrays = {name: _taken(array, loss, PADDING.get(name, 0)) for name, array in micro_batch.loss_arrays.items()}
        sources = np.empty_like(arrays["sources"])
        for row in range(rows):
            sources[row] = np.searchsorted(own[row], arrays["sources"][row])
        arrays["sources"] = np.where(arrays["loss_mask"], sources, 0)
        return MicroBatch(
            token_ids=ids, position_ids=positions, segments=np.empty((0, 4), dtype=np.int32), loss_arrays=arrays
        )

    def own_tokens(self, array: NDArray[Any], rank: int) -> NDArray[Any]:
        """Return what an array [..., R, L] holds of a rank's tokens, [..., R, l]; 0 for the padding of rows."""
        own = self.places[rank]
        padding = [(0, 0)] * (array.ndim - 1) + [(0, own.shape[1] * len(self.places) - array.shape[-1])]
        taken: NDArray[Any] = np.pad(array, padding)[..., np.arange(len(own))[:, None], own]
        return taken


def cut_context(micro_batch: MicroBatch, num_ranks: int) -> ContextCut:
    """Cut a micro-batch's rows over `num_ranks` ranks."""
    rows, length = micro_batch.token_ids.shape
    num_chunks = num_ranks * (MANY_CHUNKS_PER_RANK if length >= LONG_CHUNK * num_ranks else CHUNKS_PER_RANK)
    size = -(-length // num_chunks)  # tokens of a chunk
    owners = np.stack(
        [_owners(positions, num_ranks, num_chunks=num_chunks, size=size) for positions in micro_batch.position_ids]
    )  # [R, chunks]
    of_tokens = owners.repeat(size, axis=1)  # [R, L], padded
    places = of_tokens.argsort(axis=1, kind="stable").reshape(rows, num_ranks, -1).transpose(1, 0, 2)
    of_rows = [
        _pieces(micro_batch.segments[micro_batch.segments[:, 0] == row], of_tokens[row], first=first)
        for row, first in enumerate(np.searchsorted(micro_batch.segments[:, 0], np.arange(rows)))
    ]
    pieces = tuple(tuple(tuple(p for owner, p in row if owner == rank) for row in of_rows) for rank in range(num_ranks))
    return ContextCut(
        places=places,
        pieces=pieces,
        loss_places=_loss_places(micro_batch, of_tokens, num_ranks),
        longest_path=max(piece.num_keys for row in of_rows for _, piece in row),
    )


def _owners(positions: NDArray[np.int64], num_ranks: int, *, num_chunks: int, size: int) -> NDArray[np.int64]:
    """Return the rank of each chunk of a row, int64[chunks]; each rank has as many.

    Args:
        positions: int64[L], places in the sample: the number of tokens that a token sees before itself.
        num_ranks: C.
        num_chunks: a multiple of C.
        size: tokens of a chunk.
    """
    work = np.pad(positions + 1, (0, num_chunks * size - len(positions))).reshape(num_chunks, size).sum(axis=1)
    loads, left = np.zeros(num_ranks, dtype=np.int64), np.full(num_ranks, num_chunks // num_ranks)
    owners = np.empty(num_chunks, dtype=np.int64)
    for chunk in (-work).argsort(kind="stable"):
        rank = min((r for r in range(num_ranks) if left[r]), key=lambda r: (loads[r], r))
        owners[chunk] = rank
        loads[rank] += work[chunk]
        left[rank] -= 1
    return owners


def _pieces(segments: NDArray[np.int32], owners: NDArray[np.int64], *, first: int) -> list[tuple[int, OwnPiece]]:
    """Cut a row's segments, and its padding, where the owner of the tokens changes. Returns: (owner, piece) in order.

    Args:
        segments: int32[K, 4] of row, start, length, parent, of this row.
        owners: int64[L], of the padded row.
        first: the index of the first segment among those of all rows, which parents count from.
    """
    starts = [(int(start), int(start + size), int(parent) - first) for _, start, size, parent in segments]
    end = starts[-1][1] if starts else 0
    if end < len(owners):
        starts.append((end, len(owners), -1))
    changes = np.flatnonzero(np.diff(owners)) + 1
    paths = list[tuple[tuple[int, int], ...]]()  # of each segment, itself included
    found = list[tuple[int, OwnPiece]]()
    for start, stop, parent in starts:
        before = paths[parent] if parent >= 0 else ()
        paths.append(_joined(before, (start, stop)))
        inside = changes[(changes > start) & (changes < stop)].tolist()
        for begin, close in zip([start, *inside], [*inside, stop], strict=True):
            piece = OwnPiece(length=close - begin, ranges=_joined(before, (start, close)))
            found.append((int(owners[begin]), piece))
    return found


def _joined(path: tuple[tuple[int, int], ...], last: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """Append a range to a path, as one with the range before it if that ends where it begins."""
    if path and path[-1][1] == last[0]:
        return (*path[:-1], (path[-1][0], last[1]))
    return (*path, last)


def _loss_places(micro_batch: MicroBatch, owners: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Return int64[C, R, m], see `ContextCut`. A loss token belongs to the rank of the place that predicts it."""
    arrays = micro_batch.loss_arrays
    mask, sources = arrays["loss_mask"], arrays["sources"]
    rows, width = mask.shape
    of_loss = np.where(mask, np.take_along_axis(owners, np.where(mask, sources, 0), axis=1), -1)  # [R, M]
    counts = (of_loss[None] == np.arange(num_ranks)[:, None, None]).sum(axis=2)  # [C, R]
    places = np.full((num_ranks, rows, max(1, int(counts.max(initial=0)))), rows * width, dtype=np.int64)
    for rank in range(num_ranks):
        for row in range(rows):
            (chosen,) = (of_loss[row] == rank).nonzero()
            places[rank, row, : len(chosen)] = row * width + chosen
    return places


def _taken(array: NDArray[np.generic], places: NDArray[np.int64], padding: float) -> NDArray[np.generic]:
    """Take the entries [R, m, ...] of an array [R, M, ...] at places in R * M; padding where there is none."""
    flat = array.reshape(-1, *array.shape[2:])
    none = np.full((1, *flat.shape[1:]), padding, dtype=array.dtype)
    taken: NDArray[np.generic] = np.concatenate([flat, none])[places]
    return taken
