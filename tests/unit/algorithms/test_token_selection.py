"""Test that a share of a step's tokens is chosen alike for every split into micro-batches and ranks."""

import itertools
from collections.abc import Sequence
from threading import Barrier, Lock, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.algorithms.token_selection import SelectedTokens, kth_largest, ordered_keys
from coati_rl.batch import MicroBatch
from tests.examples import examples
from tests.unit.algorithms.batches import evaluate, lay_out, random_samples, to_micro_batch

LENGTHS = (9, 1, 6, 12, 3, 8)


class Ranks:
    """Add up the numbers of several ranks, each a thread."""

    def __init__(self, size: int) -> None:
        self._begin, self._end, self._lock = Barrier(size), Barrier(size), Lock()
        self._totals: dict[str, float] = {}

    def reduce(self, sums: dict[str, torch.Tensor]) -> dict[str, float]:
        with self._lock:
            for name, value in sums.items():
                self._totals[name] = self._totals.get(name, 0.0) + value.item()
        self._begin.wait(timeout=30)
        found = dict(self._totals)
        if self._end.wait(timeout=30) == 0:
            self._totals.clear()
        self._begin.wait(timeout=30)
        return found


def on_ranks(parts: Sequence[Any], work: Any) -> list[Any]:
    ranks, found = Ranks(len(parts)), [None] * len(parts)

    def run(rank: int) -> None:
        found[rank] = work(parts[rank], ranks.reduce)

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    return found


def with_entropies(micro_batch: MicroBatch) -> MicroBatch:
    return micro_batch.with_arrays(old_entropy=-micro_batch.loss_arrays["old_logprobs"])


def marks_of(selection: SelectedTokens, cuts: Sequence[int], size: int) -> list[list[float]]:
    """The marks of each sample's tokens, where micro-batches are cut at `cuts` and dealt to `size` ranks."""
    samples, edges = random_samples(LENGTHS, seed=5, spread=1.0), [0, *cuts, len(LENGTHS)]
    batches = [lay_out(samples[a:b], seed=a, dtype=torch.float32) for a, b in itertools.pairwise(edges)]
    dealt = [[*range(rank, len(batches), size)] for rank in range(size)]
    parts = [[with_entropies(to_micro_batch(batches[i])) for i in own] for own in dealt]
    name = "held" if selection.selection == "kl_cov" else "left_out"
    found: dict[int, Any] = {}
    for own, done in zip(dealt, on_ranks(parts, selection), strict=True):
        found |= {i: torch.tensor(each.loss_arrays[name]) for i, each in zip(own, done, strict=True)}
    assert not any(found[i][~batch.arrays["loss_mask"]].any() for i, batch in enumerate(batches))
    return [mark.tolist() for i, batch in enumerate(batches) for mark in batch.per_sample(found[i])]


SELECTIONS = (
    SelectedTokens(selection="top_entropy", fraction=0.2),
    SelectedTokens(selection="clip_cov", fraction=0.1, covariance=(0.1, 3.0)),
    SelectedTokens(selection="kl_cov", fraction=0.15),
)


@pytest.mark.parametrize("selection", SELECTIONS, ids=lambda s: s.selection)
def test_split_the_same_tokens_are_chosen_whatever_micro_batch_and_rank_they_are_in(selection: SelectedTokens) -> None:
    whole = marks_of(selection, (), 1)
    chosen = int(sum(map(sum, whole)))
    share = int(selection.fraction * sum(LENGTHS))
    assert chosen == (sum(LENGTHS) - share if selection.selection == "top_entropy" else share)
    for cuts, size in (((1, 2, 4), 1), ((1, 2, 4), 2), ((1, 2, 3, 4, 5), 4), ((), 3)):  # of 3 ranks two have nothing
        assert marks_of(selection, cuts, size) == whole


def covariances(samples: Sequence[Any]) -> np.ndarray:
    advantages = np.concatenate([s.advantages for s in samples])
    logprobs = np.concatenate([s.old_logprobs for s in samples])
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def test_tokens_are_those_of_highest_entropy_and_of_largest_covariance() -> None:
    samples = random_samples(LENGTHS, seed=5, spread=1.0)
    entropies, found = -np.concatenate([s.old_logprobs for s in samples]), covariances(samples)
    by_entropy, by_clip, by_kl = (np.concatenate(marks_of(selection, (2,), 1)) > 0 for selection in SELECTIONS)
    assert sorted(np.flatnonzero(~by_entropy)) == sorted(np.argsort(entropies)[-7:])  # 0.2 of 39
    assert sorted(np.flatnonzero(by_kl)) == sorted(np.argsort(found)[-5:])
    assert ((found[by_clip] > 0.1) & (found[by_clip] < 3.0)).all()
    inside = np.flatnonzero((found > 0.1) & (found < 3.0))
    assert sorted(np.flatnonzero(by_clip)) != sorted(inside[np.argsort(found[inside])][-3:])  # drawn, not the largest


def test_a_share_of_less_than_a_token_is_one_and_of_more_than_there_are_is_all() -> None:
    one = SelectedTokens(selection="kl_cov", fraction=1e-6)
    assert sum(map(sum, marks_of(one, (), 1))) == 1
    every = SelectedTokens(selection="clip_cov", fraction=1.0, covariance=(-99.0, 99.0))
    assert sum(map(sum, marks_of(every, (1,), 2))) == sum(LENGTHS)


def test_without_the_lm_head_nothing_is_marked() -> None:
    micro_batch = to_micro_batch(lay_out(random_samples(), dtype=torch.float32))
    for selection in SELECTIONS:
        assert selection([micro_batch], lambda sums: {}) == [micro_batch]


@examples(150)
@given(
    st.lists(
        st.lists(st.integers(0, 2**32 - 1) | st.sampled_from([0, 7, 255, 256]), max_size=9), min_size=1, max_size=3
    ),
    st.integers(1, 12),
)
def test_value_the_kth_largest_of_all_ranks(parts: list[list[int]], count: int) -> None:
    keys = [[np.array(part, np.uint32)] for part in parts]
    found = on_ranks(keys, lambda own, reduce: int(kth_largest(own, count, reduce)))
    everything = sorted((key for part in parts for key in part), reverse=True)
    assert found == [everything[count - 1] if count <= len(everything) else 0] * len(parts)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=2, max_size=20))
def test_keys_are_in_the_order_of_the_numbers(values: list[float]) -> None:
    array = np.array(values, np.float32)
    by_key = array[np.argsort(ordered_keys(array), kind="stable")]
    assert (by_key == np.sort(array)).all()


def test_gradient_a_token_that_is_left_out_has_none_and_one_that_is_held_is_pulled_to_the_old_policy() -> None:
    arrays = lay_out(random_samples((3,), seed=2)).arrays
    places = arrays["loss_mask"].nonzero()
    plain = evaluate(PolicyLoss(clip_high=9.0), arrays)[2]["logprobs"]
    out, held = torch.zeros_like(arrays["loss_mask"]), torch.zeros_like(arrays["loss_mask"])
    out[tuple(places[0])], held[tuple(places[1])] = True, True
    found = evaluate(PolicyLoss(clip_high=9.0, hold_coeff=0.5), arrays | {"left_out": out, "held": held})[2]["logprobs"]
    assert found[tuple(places[0])] == 0
    apart = (arrays["logprobs"] - arrays["old_logprobs"])[tuple(places[1])]
    weight = arrays["loss_weights"][tuple(places[1])]
    change = found[tuple(places[1])] - plain[tuple(places[1])]
    assert change.item() == pytest.approx((0.5 * weight * apart.sign()).item())
    assert found[tuple(places[2])] == plain[tuple(places[2])]
