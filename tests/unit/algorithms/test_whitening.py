"""Test whitening over the global batch: 1, 1, 1 and 5 by hand, any batch over any ranks against the oracle."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from coati_rl.algorithms.sums import merge_sums
from coati_rl.algorithms.token_advantages import advantage_sums, whiten
from coati_rl.batch import MicroBatch
from tests.examples import examples
from tests.unit.algorithms.batches import lay_out, numbers, random_samples, to_micro_batch
from tests.unit.algorithms.oracle import Sample, whitened

ADVANTAGES = arrays(np.float32, st.integers(1, 4), elements=st.floats(-8, 8, width=32) | st.just(np.float32(0.5)))


def with_advantages(advantages: list[list[float]] | list[np.ndarray]) -> list[Sample]:
    samples = random_samples([len(values) for values in advantages])
    pairs = zip(samples, advantages, strict=True)
    return [dataclasses.replace(sample, advantages=np.array(values, np.float64)) for sample, values in pairs]


def reduced(ranks: list[list[MicroBatch]]) -> dict[str, float]:
    """As the trainers do it: each its own sums, then over ranks by the names."""
    report = {}
    for micro_batches in ranks:
        report = merge_sums(report, advantage_sums(micro_batches))
    return numbers(report)


def whitened_by_rank(samples: list[Sample], cuts: set[int], *, seed: int = 0) -> list[np.ndarray]:
    """Float32[T] a sample, after a round over ranks that hold one micro-batch each."""
    edges = [0, *sorted(cuts), len(samples)]
    batches = [lay_out(samples[a:b], seed=seed + a) for a, b in itertools.pairwise(edges)]
    micro_batches = [to_micro_batch(batch) for batch in batches]
    sums = reduced([[micro_batch] for micro_batch in micro_batches])
    done = [whiten(micro_batch, sums).loss_arrays["advantages"] for micro_batch in micro_batches]
    pairs = zip(batches, done, strict=True)
    return [values[place] for batch, values in pairs for place in batch.places]


def test_value_of_four_tokens_uses_the_biased_deviation() -> None:
    # mean 2, variance (1 + 1 + 1 + 9) / 4 = 3
    found = whitened_by_rank(with_advantages([[1.0, 1.0], [1.0, 5.0]]), set())
    root = math.sqrt(3)
    np.testing.assert_allclose(np.concatenate(found), [-1 / root, -1 / root, -1 / root, 3 / root], rtol=1e-6)


@examples(120)
@given(
    advantages=st.lists(ADVANTAGES, min_size=2, max_size=6), cuts=st.sets(st.integers(1, 5)), seed=st.integers(0, 99)
)
def test_value_split_over_any_ranks_is_the_formula_over_all_tokens(
    advantages: list[np.ndarray], cuts: set[int], seed: int
) -> None:
    tokens = np.concatenate(advantages).astype(np.float64)
    assume(tokens.std() > 1e-3)
    cuts = {cut for cut in cuts if cut < len(advantages)}
    found = whitened_by_rank(with_advantages(advantages), cuts, seed=seed)
    expected = whitened([values.astype(np.float64).tolist() for values in advantages])
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    done = np.concatenate(found).astype(np.float64)
    assert done.mean() == pytest.approx(0, abs=1e-6)
    assert done.std() == pytest.approx(tokens.std() / math.sqrt(tokens.var() + 1e-8), rel=1e-4)


@pytest.mark.parametrize("value", [0.7, 0.0, -0.1, 1e6])
@pytest.mark.parametrize("cuts", [set(), {1}, {1, 2}])
def test_all_equal_advantages_become_exactly_zero_on_any_ranks(value: float, cuts: set[int]) -> None:
    found = whitened_by_rank(with_advantages([[value] * 3, [value], [value] * 2]), cuts)
    assert np.concatenate(found).tolist() == [0.0] * 6


def test_a_rank_whose_own_advantages_are_equal_is_whitened_by_those_of_all() -> None:
    found = whitened_by_rank(with_advantages([[1.0, 1.0], [3.0, 3.0]]), {1})
    np.testing.assert_allclose(np.concatenate(found), [-1, -1, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_mask_padding_counts_nowhere_and_becomes_zero(poison: float) -> None:
    micro_batch = to_micro_batch(lay_out(with_advantages([[1.0, 1.0], [1.0, 5.0]]), seed=2))
    mask = micro_batch.loss_arrays["loss_mask"]
    poisoned = micro_batch.with_arrays(
        advantages=np.where(mask, micro_batch.loss_arrays["advantages"], np.float32(poison))
    )
    sums = numbers(advantage_sums([poisoned]))
    assert sums == {
        "advantage_tokens": 4,
        "advantage_sum": 8,
        "advantage_square_sum": 28,
        "advantage_max": 5,
        "advantage_negative_max": -1,
    }
    done = whiten(poisoned, sums)
    assert not done.loss_arrays["advantages"][~mask].any()
    assert done.loss_arrays["advantages"].dtype == np.float32
    assert np.isfinite(done.loss_arrays["advantages"]).all()


def test_mask_a_micro_batch_without_loss_tokens_among_others_becomes_zero() -> None:
    full = to_micro_batch(lay_out(with_advantages([[1.0, 3.0]]), seed=1))
    empty = full.with_arrays(loss_mask=np.zeros_like(full.loss_arrays["loss_mask"]))
    sums = reduced([[full], [empty], []])
    assert sums["advantage_tokens"] == 2
    assert not whiten(empty, sums).loss_arrays["advantages"].any()
    np.testing.assert_allclose(
        whiten(full, sums).loss_arrays["advantages"][full.loss_arrays["loss_mask"]], [-1, 1], rtol=1e-6
    )


def test_mask_a_global_batch_without_loss_tokens_becomes_zero() -> None:
    full = to_micro_batch(lay_out(with_advantages([[1.0, 3.0]]), seed=1))
    empty = full.with_arrays(loss_mask=np.zeros_like(full.loss_arrays["loss_mask"]))
    assert not whiten(empty, reduced([[empty], []])).loss_arrays["advantages"].any()


def test_split_of_a_ranks_micro_batches_gives_the_same_sums() -> None:
    samples = with_advantages([[1.0, 4.0], [2.0], [-3.0, 0.5, 0.5]])
    together = [to_micro_batch(lay_out(samples, seed=1))]
    apart = [to_micro_batch(lay_out([sample], seed=1)) for sample in samples]
    assert reduced([apart]) == pytest.approx(reduced([together]), rel=1e-15)
    assert reduced([[micro_batch] for micro_batch in apart]) == pytest.approx(reduced([together]), rel=1e-15)


def test_the_micro_batch_given_is_not_changed() -> None:
    micro_batch = to_micro_batch(lay_out(with_advantages([[1.0, 3.0]]), seed=1))
    before = micro_batch.loss_arrays["advantages"].copy()
    whiten(micro_batch, reduced([[micro_batch]]))
    np.testing.assert_array_equal(micro_batch.loss_arrays["advantages"], before)


def test_rounding_noise_of_kl_on_equal_rewards_stays_noise() -> None:
    # Engine and trainer agree to 1e-7 nats: the advantages are that noise, times 1 / sqrt(1e-8) at most.
    noise = np.random.default_rng(0).normal(scale=1e-7, size=(5, 10))
    whitened_values = np.concatenate(whitened_by_rank(with_advantages([*noise]), set()))
    assert np.abs(whitened_values).max() < 1e-2
