"""Write the rows that a model reads, sample after sample or as prefix trees, and find the loss tokens in them.

The places of a row are numbered over all rows, which an array holds one after another. N loss tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import numpy as np

from coati_rl.batching.prefix_tree import build_tree
from coati_rl.routes import first_known, unknown_like
from coati_rl.samples import SplitSamples

Rows = Sequence[Sequence[int]]  # the samples in each row, by their number
Segments = list[tuple[int, int, int]]  # of a row: start, length, and the parent's index in the row or -1


@dataclass(frozen=True, slots=True)
class LossPlaces:
    """Hold where the loss tokens are, row after row, sample after sample."""

    tokens: np.ndarray  # int64[N]; a token that two samples share is there twice
    sources: np.ndarray  # int64[N], of the tokens that predict them


def write_rows(
    samples: SplitSamples, rows: Rows, lengths: Sequence[int], *, token_ids: np.ndarray, position_ids: np.ndarray
) -> LossPlaces:
    """Write rows of these lengths, each sample with all its tokens, then padding."""
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
    places = np.flatnonzero(np.concatenate(masks))
    return LossPlaces(places, places - 1)


def segments_of(row: Sequence[int], lengths: Sequence[int]) -> Segments:
    """Return the segments of a row without shared prefixes: every sample is one."""
    ends = accumulate(lengths[index] for index in row)
    return [(end - lengths[index], lengths[index], -1) for index, end in zip(row, ends, strict=True)]


@dataclass(frozen=True, slots=True)
class SharedRow:
    """Hold a row of prefix trees, one for each piece."""

    token_ids: np.ndarray  # int32[L]
    position_ids: np.ndarray  # int64[L], places in the sample
    segments: Segments
    paths: Sequence[np.ndarray]  # int64[T] of each sample of the row: where its tokens are

    @classmethod
    def of(cls, samples: SplitSamples, row: Sequence[int], piece_of: Sequence[int]) -> "SharedRow":
        """Lay out samples, of which those next to each other in the same piece share prefixes."""
        ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        segments: Segments = []
        paths: list[np.ndarray] = []
        length = 0
        for _, of_piece in groupby(row, key=lambda index: piece_of[index]):
            whole = [np.concatenate([samples.prefix_ids[index], samples.token_ids[index]]) for index in of_piece]
            tree, first, places = build_tree(whole), len(segments), list[np.ndarray]()
            for sample, start, stop, parent in tree.nodes:
                ids.append(whole[sample][start:stop])
                positions.append(np.arange(start, stop))
                places.append(np.arange(length, length + stop - start))
                segments.append((length, stop - start, parent if parent < 0 else first + parent))
                length += stop - start
            paths += [_joined([places[node] for node in tree.path(number)]) for number in range(len(whole))]
        return cls(_joined(ids), _joined(positions), segments, paths)


def write_shared_rows(
    samples: SplitSamples, rows: Rows, shared: Sequence[SharedRow], *, token_ids: np.ndarray, position_ids: np.ndarray
) -> LossPlaces:
    """Write rows that share prefixes, without padding."""
    np.concatenate([row.token_ids for row in shared], out=token_ids)
    np.concatenate([row.position_ids for row in shared], out=position_ids)
    starts = accumulate((len(row.token_ids) for row in shared), initial=0)
    tokens: list[np.ndarray] = []
    sources: list[np.ndarray] = []
    for indices, row, start in zip(rows, shared, starts, strict=False):
        for index, path in zip(indices, row.paths, strict=True):
            counted = len(samples.prefix_ids[index]) + np.flatnonzero(samples.loss_masks[index])
            tokens.append(start + path[counted])
            sources.append(start + path[counted - 1])
    return LossPlaces(_joined(tokens), _joined(sources))


def write_routes(
    samples: SplitSamples, rows: Rows, shared: Sequence[SharedRow] | None, lengths: Sequence[int]
) -> np.ndarray | None:
    """Return the routes of rows of these lengths, uint[all tokens, D, K]; None if no sample has any.

    A token that samples share is computed once, by the experts of the first of them that knows its experts.
    """
    if samples.routes is None:
        return None
    routes = unknown_like(sum(lengths), samples.routes[0])
    starts = accumulate(lengths, initial=0)
    for number, (row, start) in enumerate(zip(rows, starts, strict=False)):
        if shared is None:
            own = segments_of(row, samples.lengths)
            paths: Sequence[np.ndarray] = [np.arange(begin, begin + length) for begin, length, _ in own]
        else:
            paths = shared[number].paths
        for index, path in zip(row, paths, strict=True):
            routes[start + path] = first_known(routes[start + path], samples.routes[index])
    return routes


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
