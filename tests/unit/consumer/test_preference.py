"""Test the objective of preference pairs: what it scores, its metrics, equal completions."""

import dataclasses

import pytest

from consumer.objectives.preference import Preference
from tests.unit.algorithms.units import micro_batches_of, random_completions, samples_of


@pytest.mark.parametrize("loss", ["dpo", "ipo", "robust"])
def test_a_reference_is_scored_unless_the_samples_hold_its_log_probabilities(loss: str) -> None:
    scored = Preference(loss=loss)
    assert scored.scores == {"ref_logprobs": "reference"}
    assert scored.roles == {"policy", "reference"}
    assert scored.unit == 2
    assert Preference(loss=loss, has_ref_logprobs=True).roles == {"policy"}


@pytest.mark.parametrize("loss", ["simpo", "orpo"])
def test_some_losses_need_no_reference(loss: str) -> None:
    assert Preference(loss=loss).roles == {"policy"}


@pytest.mark.parametrize("limits", [{}, {"max_samples": 2}, {"one_sample_per_row": True}, {"num_ranks": 3}])
def test_pairs_of_equal_completions_are_counted(limits: dict) -> None:
    lengths = ((4, 4), (4, 4), (5, 4), (1, 1))
    samples = samples_of(random_completions(0, lengths=lengths))
    for chosen in (2, 4, 6):  # the pair of 5 and 4 tokens agrees in the first 4
        rejected = samples[chosen + 1]
        same = samples[chosen].token_ids[: len(rejected.token_ids)]
        samples[chosen + 1] = dataclasses.replace(rejected, token_ids=same)
    parts = tuple(micro_batches_of(samples, **limits))
    unchanged, sums = Preference().targets(parts)
    assert unchanged is parts
    assert sums["equal_pairs"].item() == 2.0


def test_a_rank_without_samples_counts_no_pair() -> None:
    assert Preference().targets(())[1]["equal_pairs"].item() == 0.0


def test_metrics_are_means_over_pairs_and_null_without_any() -> None:
    sums = {"loss_sum": 2.0, "nll_sum": 3.0, "num_pairs": 4.0, "correct_pairs": 3.0, "equal_pairs": 1.0}
    sums |= {"chosen_reward_sum": 2.0, "rejected_reward_sum": -2.0, "num_tokens": 20.0, "entropy_sum": 30.0}
    sums |= {"chosen_logprob_sum": -40.0, "rejected_logprob_sum": -60.0}
    metrics = Preference().metrics(sums, loss_scale=1 / 4)
    assert metrics == {
        "loss": 0.5,
        "rewards/chosen": 0.5,
        "rewards/rejected": -0.5,
        "rewards/accuracies": 0.75,
        "rewards/margins": 1.0,
        "logps/chosen": -10.0,
        "logps/rejected": -15.0,
        "nll_loss": 0.75,
        "entropy_mean": 1.5,
        "pairs": 4,
        "pairs_equal": 1,
        "loss_tokens": 20,
    }
    empty = Preference().metrics(dict.fromkeys(sums, 0.0), loss_scale=0.0)
    assert empty.keys() == metrics.keys()
    assert {name for name, value in empty.items() if value is not None} == {"pairs", "pairs_equal", "loss_tokens"}
