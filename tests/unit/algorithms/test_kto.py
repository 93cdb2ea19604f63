"""Test KTO: by hand, against the paper, the KL estimate over the whole step, splits and refusals."""

import math

import numpy as np
import pytest
import torch

from coati_rl.algorithms.kto import kl_estimate, kto_terms
from consumer.objectives.kto import MISMATCHED, Kto
from tests.unit.algorithms import preference_oracle as oracle
from tests.unit.algorithms.units import evaluate_kto, micro_batches_of, random_completions, samples_of

LN3 = math.log(3)
LABELS = [True, False, False, True]
SETTINGS = {"beta": 0.4, "desirable_weight": 1.5, "undesirable_weight": 0.5}
KTO = Kto(**SETTINGS)
SEEDS = range(6)  # with estimates on both sides of 0


def test_value_and_gradient_by_hand() -> None:
    log_ratios = torch.tensor([LN3 + 1, LN3 + 1], dtype=torch.float64, requires_grad=True)
    terms = kto_terms(
        log_ratios,
        torch.tensor([True, False]),
        torch.tensor(1.0, dtype=torch.float64),
        beta=1.0,
        desirable_weight=2.0,
        undesirable_weight=4.0,
    )
    assert terms.tolist() == pytest.approx([2 / 4, 4 * 3 / 4])  # sigmoid(ln 3) = 3/4
    terms.sum().backward()
    assert log_ratios.grad.tolist() == pytest.approx([-2 * 3 / 16, 4 * 3 / 16])


def test_the_kl_estimate_is_the_mean_and_not_negative() -> None:
    assert kl_estimate(6.0, 4) == 1.5
    assert kl_estimate(-6.0, 4) == 0.0
    with pytest.raises(ValueError, match="KTO needs mismatched completions to estimate KL, and the step has none"):
        kl_estimate(0.0, 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_value_and_gradient_are_the_papers(seed: int) -> None:
    completions = random_completions(seed)
    value, gradients, _ = evaluate_kto(KTO, completions, LABELS)
    weights = {"desirable": SETTINGS["desirable_weight"], "undesirable": SETTINGS["undesirable_weight"]}
    examples = [*zip(completions[::2], LABELS, strict=True)]
    expected = oracle.kto(examples, completions[1::2], beta=SETTINGS["beta"], **weights)
    assert value == pytest.approx(sum(each[0] for each in expected), rel=1e-6)
    assert len(gradients) == len(LABELS)  # mismatched completions are not in the loss
    for found, (_, right) in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-6, atol=1e-12)


def test_both_sides_of_the_bound_of_the_kl_estimate_are_met() -> None:
    found = {evaluate_kto(KTO, random_completions(seed), LABELS)[2]["kl_sum_of_examples"] > 0 for seed in SEEDS}
    assert found == {True, False}


def test_the_kl_estimate_is_one_for_the_step_however_it_is_split() -> None:
    seed = next(
        seed for seed in SEEDS if evaluate_kto(KTO, random_completions(seed), LABELS)[2]["kl_sum_of_examples"] > 0
    )
    completions = random_completions(seed)
    value, gradients, sums = evaluate_kto(KTO, completions, LABELS)
    for limits in (
        {"max_samples": 2},
        {"max_samples": 4, "one_sample_per_row": True},
        {"max_samples": 4, "num_ranks": 2},
        {"max_samples": 2, "num_ranks": 3, "one_sample_per_row": True},
    ):
        found = evaluate_kto(KTO, completions, LABELS, **limits)
        assert found[0] == pytest.approx(value, rel=1e-12)
        assert found[2] == pytest.approx(sums, rel=1e-12)
        for one, other in zip(found[1], gradients, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12)


def test_the_policy_is_scored_for_the_estimate_and_the_reference_unless_the_samples_hold_it() -> None:
    assert KTO.scores == {"policy_logprobs": "policy", "ref_logprobs": "reference"}
    held = Kto(has_ref_logprobs=True)
    assert held.scores == {"policy_logprobs": "policy"}
    assert held.roles == {"policy"}
    assert (KTO.unit, KTO.needs_whole_step) == (2, True)


def test_a_rank_without_the_lm_head_sums_nothing_and_one_without_samples_sums_0() -> None:
    samples = samples_of(random_completions(0), label=[1.0, MISMATCHED] * 4)
    assert KTO.step_sums(micro_batches_of(samples)) == {}  # not scored
    assert KTO.step_sums([]) == {"kl_sum": 0.0, "kl_samples": 0.0}


def test_metrics_are_means_of_desirable_and_undesirable_examples_and_null_without_any() -> None:
    sums = {"loss_sum": 3.0, "kl_sum_of_examples": 1.5, "num_tokens": 10.0, "entropy_sum": 20.0}
    sums |= {"num_chosen": 2.0, "chosen_reward_sum": 1.0, "chosen_logprob_sum": -8.0}
    sums |= {"num_rejected": 1.0, "rejected_reward_sum": -0.5, "rejected_logprob_sum": -6.0}
    assert KTO.metrics(sums, loss_scale=1 / 3) == {
        "loss": 1.0,
        "kl": 0.5,
        "rewards/chosen": 0.5,
        "rewards/rejected": -0.5,
        "rewards/margins": 1.0,
        "logps/chosen": -4.0,
        "logps/rejected": -6.0,
        "entropy_mean": 2.0,
        "examples_desirable": 2,
        "examples_undesirable": 1,
        "loss_tokens": 10,
    }
    assert KTO.metrics({**sums, "num_chosen": 0.0, "num_rejected": 0.0}, loss_scale=0.0)["kl"] is None
    alone = KTO.metrics({**sums, "num_rejected": 0.0}, loss_scale=1 / 2)
    assert (alone["rewards/rejected"], alone["rewards/margins"], alone["rewards/chosen"]) == (None, None, 0.5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": -1.0}, "beta = -1.0 must be positive"),
        ({"desirable_weight": -1.0}, "desirable_weight = -1.0 must not be negative"),
        ({"undesirable_weight": math.inf}, "undesirable_weight = inf must not be negative"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Kto(**settings)
