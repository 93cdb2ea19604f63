"""Test how rows are cut over context-parallel ranks: each token once, as many for each, equal work, the same keys."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from coati_rl.batch import MicroBatch
from consumer.models.context_cut import ContextCut, OwnPiece, cut_context

Tree = Sequence[tuple[int, int]]  # of a row's segments: length and parent, -1 without one


def micro_batch(rows: Sequence[Tree], *, padding: int = 0) -> MicroBatch:
    """Every token but a segment's first is predicted by the one before it."""
    length = max(sum(size for size, _ in row) for row in rows) + padding
    ids = np.arange(len(rows) * length, dtype=np.int64).reshape(len(rows), length)
    positions, segments = np.zeros_like(ids), list[tuple[int, int, int, int]]()
    sources = list[list[int]]()
    for number, row in enumerate(rows):
        place, first, depths, found = 0, len(segments), list[int](), list[int]()
        for size, parent in row:
            before = depths[parent] if parent >= 0 else 0
            positions[number, place : place + size] = np.arange(before, before + size)
            depths.append(before + size)
            segments.append((number, place, size, first + parent if parent >= 0 else -1))
            found += range(place, place + size - 1)
            place += size
        positions[number, place:] = np.arange(length - place)
        sources.append(found)
    width = max(1, *map(len, sources))
    mask = np.array([[index < len(of_row) for index in range(width)] for of_row in sources])
    padded = np.array([of_row + [0] * (width - len(of_row)) for of_row in sources])
    targets = np.where(mask, np.take_along_axis(ids, padded, axis=1) + 1, 0)
    index = np.where(mask, 0, -1).astype(np.int32)
    arrays = {"token_ids": targets, "sources": padded, "loss_mask": mask, "sample_index": index}
    return MicroBatch(token_ids=ids, position_ids=positions, segments=np.array(segments), loss_arrays=arrays)


ROWS = {
    "one sample": [[(50, -1)]],
    "shorter than a chunk": [[(1, -1), (2, -1), (1, -1)]],
    "packed": [[(7, -1), (20, -1), (3, -1), (11, -1)]],
    "shared": [[(9, -1), (4, 0), (13, 0), (6, 2), (5, -1), (8, 4)]],
    "padded": [[(12, -1)], [(3, -1)], [(30, -1)]],
    "two tokens": [[(2, -1)]],
}
CASES = [*itertools.product(ROWS, (2, 3, 4))]


def keys_of(cut: ContextCut, rank: int, row: int) -> dict[int, list[int]]:
    """The places that each of a rank's tokens sees, by its own."""
    seen = {}
    places = iter(cut.places[rank, row].tolist())
    for piece in cut.pieces[rank][row]:
        path = [place for start, end in piece.ranges for place in range(start, end)]
        for number in range(piece.length):
            seen[next(places)] = path[: len(path) - piece.length + number + 1]
    return seen


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_every_token_is_on_one_rank_and_sees_its_path_up_to_itself(name: str, num_ranks: int) -> None:
    batch = micro_batch(ROWS[name], padding=3)
    cut = cut_context(batch, num_ranks)
    length = batch.token_ids.shape[1]
    for row, tree in enumerate(ROWS[name]):
        assert sorted(cut.places[:, row].flatten().tolist()) == [*range(cut.places.shape[2] * num_ranks)]
        seen = {place: keys for rank in range(num_ranks) for place, keys in keys_of(cut, rank, row).items()}
        starts, paths = [0, *itertools.accumulate(size for size, _ in tree)], list[list[int]]()
        for number, (size, parent) in enumerate(tree):
            before = paths[parent] if parent >= 0 else []
            own = [*range(starts[number], starts[number] + size)]
            paths.append(before + own)
            for place in own:
                assert seen[place] == [*before, *range(own[0], place + 1)]
        assert all(seen[place][-1] == place for place in range(length))


@pytest.mark.parametrize(("name", "num_ranks"), CASES)
def test_every_loss_token_is_on_the_rank_of_its_source_with_all_its_numbers(name: str, num_ranks: int) -> None:
    batch = micro_batch(ROWS[name], padding=2)
    cut = cut_context(batch, num_ranks)
    found = list[int]()
    for rank in range(num_ranks):
        local = cut.local_batch(batch, rank)
        arrays = local.loss_arrays
        for row, column in np.argwhere(arrays["loss_mask"]):
            assert local.token_ids[row, arrays["sources"][row, column]] + 1 == arrays["token_ids"][row, column]
        found += arrays["token_ids"][arrays["loss_mask"]].tolist()
        own = cut.loss_places[rank][cut.loss_places[rank] < batch.loss_arrays["loss_mask"].size]
        assert (
            batch.loss_arrays["token_ids"].flatten()[own].tolist() == arrays["token_ids"][arrays["loss_mask"]].tolist()
        )
    assert sorted(found) == sorted(batch.loss_arrays["token_ids"][batch.loss_arrays["loss_mask"]].tolist())


def test_one_sample_is_cut_in_zigzag_order() -> None:
    cut = cut_context(micro_batch([[(16, -1)]]), 2)
    assert cut.places[:, 0].tolist() == [[0, 1, 2, 3, 12, 13, 14, 15], [4, 5, 6, 7, 8, 9, 10, 11]]
    assert [[piece.length for piece in pieces[0]] for pieces in cut.pieces] == [[4, 4], [8]]
    assert cut.pieces[1][0][0].ranges == ((0, 12),)


@pytest.mark.parametrize("lengths", [(8192,), (6000, 2192), (500,) * 16, (4000, 100, 3000, 1092), (2, 8190)])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_have_equal_tokens_and_nearly_equal_work(lengths: Sequence[int], num_ranks: int) -> None:
    batch = micro_batch([[(size, -1) for size in lengths]])
    cut = cut_context(batch, num_ranks)
    work = [(batch.position_ids[0][cut.places[rank, 0] % 8192] + 1).sum() for rank in range(num_ranks)]
    assert max(work) < 1.25 * sum(work) / num_ranks


def test_a_blank_micro_batch_has_no_loss_token_on_any_rank() -> None:
    from coati_rl.batching.packing import blank_micro_batch

    cut = cut_context(blank_micro_batch(), 4)
    assert (cut.loss_places == 1).all()
    for rank in range(4):
        assert not cut.local_batch(blank_micro_batch(), rank).loss_arrays["loss_mask"].any()


def test_a_window_takes_the_first_tokens_of_a_path_away() -> None:
    piece = OwnPiece(length=3, ranges=((0, 2), (4, 6), (9, 12)))  # 4 tokens before its own
    assert piece.seen(None) == piece.seen(5) == piece.ranges
    assert piece.seen(4) == ((1, 2), (4, 6), (9, 12))
    assert piece.seen(2) == ((5, 6), (9, 12))
    assert piece.seen(1) == ((9, 12),)
