"""Test cross-entropy on three tokens by hand: value, gradient, mask, split and metrics."""

import math

import pytest
import torch

from consumer.objectives.cross_entropy import CrossEntropy

LOGPROBS = [[math.log(0.5), math.log(0.25), math.log(0.125)]]


def arrays(mask: list[bool], weights: tuple[float, ...] = (1.0, 1.0, 1.0)) -> dict[str, torch.Tensor]:
    return {"loss_mask": torch.tensor([mask]), "loss_weights": torch.tensor([weights])}


def evaluate(logprobs: list[list[float]], **given: torch.Tensor) -> tuple[float, dict[str, float], list[float]]:
    leaf = torch.tensor(logprobs, requires_grad=True)
    loss, sums = CrossEntropy()(leaf, torch.zeros_like(leaf), given)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.item(), {name: value.item() for name, value in sums.items()}, gradient[0].tolist()


def test_value_is_the_weighted_sum_of_minus_log_p() -> None:
    loss, sums, _ = evaluate(LOGPROBS, **arrays([True] * 3, (1.0, 1.0, 0.5)))
    assert loss == pytest.approx((1 + 2 + 1.5) * math.log(2))  # 1, 2 and 3 times log 2
    assert sums["nll_sum"] == pytest.approx(6 * math.log(2))
    assert sums["num_tokens"] == 3


def test_gradient_is_minus_the_weight() -> None:
    assert evaluate(LOGPROBS, **arrays([True] * 3, (1.0, 0.5, 0.25)))[2] == [-1.0, -0.5, -0.25]


@pytest.mark.parametrize("poison", [math.nan, -math.inf])
def test_mask_what_it_hides_neither_counts_nor_spoils_the_gradient(poison: float) -> None:
    loss, sums, gradient = evaluate([[LOGPROBS[0][0], poison, LOGPROBS[0][2]]], **arrays([True, False, True]))
    assert loss == pytest.approx(4 * math.log(2))
    assert sums["num_tokens"] == 2
    assert gradient == [-1.0, 0.0, -1.0]


def test_split_by_tokens_adds_up() -> None:
    parts = [evaluate([[p]], loss_mask=torch.tensor([[True]]), loss_weights=torch.ones(1, 1))[0] for p in LOGPROBS[0]]
    assert sum(parts) == pytest.approx(evaluate(LOGPROBS, **arrays([True] * 3))[0])


def test_metrics_are_means_over_loss_tokens_and_null_without_any() -> None:
    sums = {"loss_sum": 6.0, "nll_sum": 6.0, "num_tokens": 3.0, "entropy_sum": 1.5}
    metrics = CrossEntropy().metrics(sums, loss_scale=1 / 3)
    assert metrics == {"loss": 2.0, "perplexity": pytest.approx(math.exp(2)), "entropy_mean": 0.5, "loss_tokens": 3}
    empty = CrossEntropy().metrics(dict.fromkeys(sums, 0.0), loss_scale=0.0)
    assert empty == {"loss": None, "perplexity": None, "entropy_mean": None, "loss_tokens": 0}
    assert CrossEntropy().metrics({**sums, "nll_sum": 1e9}, loss_scale=1.0)["perplexity"] == math.exp(80)
