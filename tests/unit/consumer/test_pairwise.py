"""Test the pairwise objective on literal rewards: value, gradient, padding, split and metrics."""

import math

import pytest
import torch

from consumer.objectives.pairwise import Pairwise

# Two pairs: rewards 2 against 1, and 0 against 3.
REWARDS, MARGIN = [2.0, 1.0, 0.0, 3.0], [0.0, 0.0, 1.0, 1.0]


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def evaluate(
    values: list[list[float]], index: list[list[int]], margin: list[list[float]] | None, coefficient: float = 0.0
) -> tuple[float, dict[str, float], list[list[float]]]:
    """Loss, sums and gradient; a sample index of -1 is padding."""
    leaf, sample_index = torch.tensor(values, requires_grad=True), torch.tensor(index)
    arrays = {"loss_mask": sample_index >= 0, "sample_index": sample_index}
    arrays |= {} if margin is None else {"margin": torch.tensor(margin)}
    loss, sums = Pairwise(center_coefficient=coefficient)(leaf, torch.zeros_like(leaf), arrays)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), {name: value.item() for name, value in sums.items()}, gradient.tolist()


def test_value_is_the_sum_over_pairs_with_margin_and_centre_penalty() -> None:
    loss, sums, _ = evaluate([REWARDS], [[0, 1, 2, 3]], [MARGIN], 0.1)
    assert loss == pytest.approx(softplus(-1) + softplus(4) + 0.1 * (9 + 9))
    assert sums == {
        "num_pairs": 2,
        "loss_sum": pytest.approx(loss),
        "correct_sum": 1,
        "margin_sum": -2,
        "chosen_sum": 2,
        "rejected_sum": 4,
    }


def test_gradient_is_the_probability_of_the_wrong_order() -> None:
    wrong = [1 / (1 + math.exp(1)), 1 / (1 + math.exp(-4))]
    (gradient,) = evaluate([REWARDS], [[0, 1, 2, 3]], [MARGIN])[2]
    assert gradient == pytest.approx([-wrong[0], wrong[0], -wrong[1], wrong[1]])


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_padding_neither_counts_nor_spoils_the_gradient(poison: float) -> None:
    rows = [[2.0, 1.0, poison], [0.0, 3.0, poison]]
    loss, _, gradient = evaluate(rows, [[0, 1, -1], [2, 3, -1]], [[0.0, 0.0, 5.0], [1.0, 1.0, 5.0]])
    assert loss == pytest.approx(evaluate([REWARDS], [[0, 1, 2, 3]], [MARGIN])[0])
    assert [row[2] for row in gradient] == [0.0, 0.0]
    assert all(math.isfinite(value) for row in gradient for value in row)


def test_one_sample_per_row_and_one_pair_per_micro_batch_add_up_to_the_same() -> None:
    whole = evaluate([REWARDS], [[0, 1, 2, 3]], [MARGIN])
    assert evaluate([[r] for r in REWARDS], [[0], [1], [2], [3]], [[m] for m in MARGIN])[:2] == whole[:2]
    first, second = evaluate([REWARDS[:2]], [[0, 1]], [MARGIN[:2]]), evaluate([REWARDS[2:]], [[2, 3]], [MARGIN[2:]])
    assert first[0] + second[0] == pytest.approx(whole[0])
    assert [*first[2][0], *second[2][0]] == whole[2][0]


def test_a_blank_micro_batch_has_no_pairs_and_a_zero_gradient() -> None:
    loss, sums, gradient = evaluate([[0.0]], [[-1]], None)
    assert loss == 0 == sums["num_pairs"]
    assert gradient == [[0.0]]


@pytest.mark.parametrize("index", [[0, 1, 2], [1, 2, 4, 5], [0, 1, 2, 4], [0, 0, 1, 1]])
def test_what_is_not_pairs_is_refused(index: list[int]) -> None:
    with pytest.raises(ValueError, match="one loss token in each"):
        evaluate([[1.0] * len(index)], [index], None)


def test_metrics_are_means_over_pairs_and_null_without_any() -> None:
    _, sums, _ = evaluate([REWARDS], [[0, 1, 2, 3]], [MARGIN])
    assert Pairwise().metrics(sums, loss_scale=1 / 2) == {
        "loss": pytest.approx((softplus(-1) + softplus(4)) / 2),
        "rewards/chosen": 1.0,
        "rewards/rejected": 2.0,
        "rewards/accuracies": 0.5,
        "rewards/margins": -1.0,
        "pairs": 2,
    }
    empty = Pairwise().metrics(dict.fromkeys(sums, 0.0), loss_scale=0.0)
    assert {*empty.values()} == {None, 0}
    assert empty["pairs"] == 0
    assert Pairwise().unit == 2
