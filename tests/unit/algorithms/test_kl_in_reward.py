"""Test KL in the reward, as a reward to go: three tokens by hand, any layout against the oracle."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.algorithms.token_advantages import subtract_kl_to_go
from coati_rl.batch import MicroBatch
from tests.examples import examples
from tests.micro_batches import grid_micro_batch
from tests.unit.algorithms.batches import Batch, lay_out, numbers, random_samples, to_micro_batch
from tests.unit.algorithms.oracle import Sample, kl_term, minus_kl_to_go


def row(*samples: list[float], advantage: float = 1.0) -> MicroBatch:
    """Samples in one row, each after one prompt token, by the D of old policy and reference on each token."""
    differences = np.array([[value for sample in samples for value in (0.0, *sample)]], np.float32)
    index = np.array([[i for i, sample in enumerate(samples) for _ in (0.0, *sample)]], np.int32)
    mask = np.array([[is_response for sample in samples for is_response in (False, *[True] * len(sample))]])
    zeros = np.zeros(mask.shape, np.float32)
    return grid_micro_batch(
        token_ids=zeros.astype(np.int64),
        position_ids=zeros.astype(np.int64),
        sample_index=index,
        loss_mask=mask,
        loss_weights=zeros,
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        rollout_logprobs=zeros - 5,
        temperature=zeros + 1,
        policy_version=zeros.astype(np.int32),
        old_logprobs=zeros - 1,
        ref_logprobs=-1 - differences,
    )


def without(micro_batch: MicroBatch, name: str) -> MicroBatch:
    arrays = {key: array for key, array in micro_batch.loss_arrays.items() if key != name}
    return dataclasses.replace(micro_batch, loss_arrays=arrays)


def test_value_each_token_pays_for_itself_and_all_that_follow_in_its_sample() -> None:
    # D = 1, 2, 4: to go 7, 6, 4, times 1/10; the second sample's 3 stays its own
    found, sums = subtract_kl_to_go(row([1.0, 2.0, 4.0], [3.0]), kl_coeff=0.1, estimator="k1")
    np.testing.assert_allclose(found.loss_arrays["advantages"][0], [0, 0.3, 0.4, 0.6, 0, 0.7], rtol=1e-6)
    assert numbers(sums) == {"kl_sum": 10.0}


@pytest.mark.parametrize(
    ("estimator", "kl"), [("k1", math.log(2)), ("k2", math.log(2) ** 2 / 2), ("k3", 0.5 + math.log(2) - 1)]
)
def test_value_by_estimator(estimator: str, kl: float) -> None:
    found, _ = subtract_kl_to_go(row([math.log(2)]), kl_coeff=0.5, estimator=estimator)
    assert found.loss_arrays["advantages"][0, 1] == pytest.approx(1 - 0.5 * kl, rel=1e-6)


def test_value_a_clamp_bounds_each_token_before_the_sum() -> None:
    found, sums = subtract_kl_to_go(row([1.0, 2.0, 4.0]), kl_coeff=0.1, estimator="k1", clamp=1.5)
    np.testing.assert_allclose(found.loss_arrays["advantages"][0], [0, 0.6, 0.7, 0.85], rtol=1e-6)  # 1, 1.5, 1.5 to go
    assert numbers(sums) == {"kl_sum": 4.0}


@examples(120)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    estimator=st.sampled_from(("k1", "k2", "k3")),
)
def test_value_of_any_layout_is_the_formulas(lengths: list[int], seed: int, estimator: str) -> None:
    samples = random_samples(lengths, seed=seed, spread=1.0)
    batch = lay_out(samples, seed=seed)
    found, sums = subtract_kl_to_go(to_micro_batch(batch), kl_coeff=0.3, estimator=estimator)
    total = 0.0
    for place, sample in zip(batch.places, samples, strict=True):
        pairs = zip(sample.old_logprobs, sample.ref_logprobs, strict=True)
        kl = [kl_term(float(old), float(ref), estimator)[0] for old, ref in pairs]
        to_go = minus_kl_to_go(0.0, kl, 0.3)
        np.testing.assert_allclose(
            found.loss_arrays["advantages"][place], sample.advantages + to_go, rtol=1e-5, atol=1e-5
        )
        total += math.fsum(kl)
    assert sums["kl_sum"].item() == pytest.approx(total, rel=1e-5, abs=1e-5)


def test_value_rollout_logprobs_stand_in_for_old_ones() -> None:
    micro_batch = without(row([0.0, 0.0]), "old_logprobs")  # rollout: -5, reference: -1
    found, _ = subtract_kl_to_go(micro_batch, kl_coeff=0.1, estimator="k1")
    np.testing.assert_allclose(found.loss_arrays["advantages"][0], [0, 1 + 0.8, 1 + 0.4], rtol=1e-6)


def in_row(samples: list[Sample], seed: int) -> tuple[Batch, MicroBatch]:
    batch = lay_out(samples, seed=seed)
    return batch, subtract_kl_to_go(to_micro_batch(batch), kl_coeff=0.3, estimator="k3")[0]


@pytest.mark.parametrize("poison", [math.nan, -math.inf, math.inf])
def test_mask_padding_of_any_content_neither_counts_nor_changes(poison: float) -> None:
    micro_batch = row([1.0, 2.0, 4.0], [3.0])
    hidden = micro_batch.loss_arrays["loss_mask"].copy()
    hidden[0, 2] = False  # a token within the response that the loss does not count: its KL is not paid for either
    names = ("advantages", "old_logprobs", "ref_logprobs", "rollout_logprobs")
    poisoned = {name: np.where(hidden, micro_batch.loss_arrays[name], np.float32(poison)) for name in names}
    found, sums = subtract_kl_to_go(micro_batch.with_arrays(loss_mask=hidden, **poisoned), kl_coeff=0.1, estimator="k1")
    np.testing.assert_allclose(found.loss_arrays["advantages"][hidden], [1 - 0.5, 1 - 0.4, 1 - 0.3], rtol=1e-6)
    np.testing.assert_array_equal(found.loss_arrays["advantages"][~hidden], np.float32(poison))
    assert numbers(sums) == {"kl_sum": 8.0}


def test_mask_a_micro_batch_without_loss_tokens_stays_as_it_is() -> None:
    micro_batch = row([1.0, 2.0])
    micro_batch = micro_batch.with_arrays(loss_mask=np.zeros_like(micro_batch.loss_arrays["loss_mask"]))
    found, sums = subtract_kl_to_go(micro_batch, kl_coeff=0.1, estimator="k3")
    np.testing.assert_array_equal(found.loss_arrays["advantages"], micro_batch.loss_arrays["advantages"])
    assert numbers(sums) == {"kl_sum": 0.0}


def test_split_samples_pay_the_same_alone_as_among_others() -> None:
    samples = random_samples((3, 1, 4, 2), seed=2)
    together, found = in_row(samples, seed=2)
    for place, sample in zip(together.places, samples, strict=True):
        alone, done = in_row([sample], seed=3)
        np.testing.assert_array_equal(
            found.loss_arrays["advantages"][place], done.loss_arrays["advantages"][alone.places[0]]
        )


def test_refusal_without_a_reference_and_of_an_unknown_estimator() -> None:
    micro_batch = row([1.0])
    with pytest.raises(ValueError, match="KL in the reward needs ref_logprobs"):
        subtract_kl_to_go(without(micro_batch, "ref_logprobs"), kl_coeff=0.1, estimator="k1")
    with pytest.raises(ValueError, match="'k4' is unknown"):
        subtract_kl_to_go(micro_batch, kl_coeff=0.1, estimator="k4")
