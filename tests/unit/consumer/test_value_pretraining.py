"""Test the objective of value pretraining on literal values: loss, gradient, mask, split and metrics."""

from typing import Any

import pytest
import torch

from coati_rl.algorithms.value_loss import ValueLoss
from consumer.objectives.value_pretraining import ValuePretraining

SQUARED = ValuePretraining(value_loss=ValueLoss())
MASK = [[True, False, True, True]]
VALUES, RETURNS = [[1.0, 9.0, 2.0, 4.0]], [[0.0, 7.0, 2.0, 1.0]]  # errors 1, 0, 3


def evaluate(values: Any, objective: ValuePretraining = SQUARED) -> tuple[float, dict[str, float], list[list[float]]]:
    leaf = torch.tensor(values, requires_grad=True)
    arrays = {"loss_mask": torch.tensor(MASK), "loss_weights": torch.ones(1, 4), "returns": torch.tensor(RETURNS)}
    loss, sums = objective.losses["policy"](leaf, torch.zeros_like(leaf), arrays)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), {name: value.item() for name, value in sums.items()}, gradient.tolist()


def test_value_and_gradient_are_those_of_half_the_squared_error_of_loss_tokens() -> None:
    loss, _, gradient = evaluate(VALUES)
    assert loss == pytest.approx((1 + 0 + 9) / 2)
    assert gradient == [[1.0, 0.0, 0.0, 3.0]]


def test_a_large_error_is_linear_with_huber() -> None:
    loss, _, gradient = evaluate(VALUES, ValuePretraining(value_loss=ValueLoss(huber=1.0)))
    assert loss == pytest.approx(0.5 + 0 + 2.5)
    assert gradient == [[1.0, 0.0, 0.0, 1.0]]


def test_what_the_mask_hides_neither_counts_nor_spoils_the_gradient() -> None:
    assert evaluate([[1.0, 1e30, 2.0, 4.0]]) == evaluate(VALUES)


def test_metrics_are_means_over_tokens_and_the_variance_that_the_values_explain() -> None:
    metrics = SQUARED.metrics(evaluate(VALUES)[1], loss_scale=1 / 3)
    # Var(G) = Var(0, 2, 1) = 2/3; residuals -1, 0, -3 have the variance 14/9.
    assert metrics == {
        "loss": pytest.approx(5 / 3),
        "explained_variance": pytest.approx(1 - (14 / 9) / (2 / 3)),
        "value_mean": pytest.approx(7 / 3),
        "return_mean": pytest.approx(1.0),
        "loss_tokens": 3,
    }


def test_a_part_without_tokens_adds_nothing() -> None:
    empty = {"loss_mask": torch.zeros(1, 4, dtype=torch.bool), "loss_weights": torch.zeros(1, 4)}
    values = torch.zeros(1, 4, requires_grad=True)
    loss, sums = SQUARED(values, torch.zeros(1, 4), empty)
    assert loss.item() == 0 and not any(value.item() for value in sums.values())
    assert set(SQUARED.metrics(dict.fromkeys(sums, 0.0), loss_scale=0.0).values()) == {None, 0}
