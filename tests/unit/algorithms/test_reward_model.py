"""Test the losses of reward models: by hand, against NumPy, and against TRL's RewardTrainer."""

import math
import os
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from coati_rl.algorithms.reward_model import bradley_terry_loss, label_loss

N = 9


def make_rewards(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chosen, rejected, margin, float64[N]; some differences are far out in either tail."""
    rng = np.random.default_rng(seed)
    chosen, rejected = rng.normal(size=N) * 3, rng.normal(size=N) * 3
    chosen[0], rejected[0] = 40.0, -40.0
    chosen[1], rejected[1] = -40.0, 40.0
    return torch.tensor(chosen), torch.tensor(rejected), torch.tensor(rng.uniform(0, 2, size=N))


def oracle_pairs(
    chosen: np.ndarray, rejected: np.ndarray, margin: np.ndarray, coefficient: float
) -> tuple[np.ndarray, ...]:
    """Loss of each pair and its derivatives, from the formula."""
    apart = chosen - rejected - margin
    loss = np.logaddexp(0.0, -apart) + coefficient * (chosen + rejected) ** 2
    wrong = np.exp(-np.logaddexp(0.0, apart))  # sigmoid(-apart): the probability of the wrong order
    centre = 2 * coefficient * (chosen + rejected)
    return loss, -wrong + centre, wrong + centre


def test_value_is_minus_log_of_the_probability_of_the_right_order() -> None:
    # sigmoid(log 3) = 3/4; with a margin of log 3 the probability is 1/2.
    chosen, rejected = torch.tensor([math.log(3), math.log(3)]), torch.zeros(2)
    loss = bradley_terry_loss(chosen, rejected, torch.tensor([0.0, math.log(3)]))
    assert loss.tolist() == pytest.approx([-math.log(0.75), math.log(2)])
    assert bradley_terry_loss(
        torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([2.0]), center_coefficient=0.1
    ).tolist() == pytest.approx([math.log(2) + 0.1 * 16])


@pytest.mark.parametrize("coefficient", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_of_pairs_are_the_formulas(seed: int, coefficient: float) -> None:
    chosen, rejected, margin = make_rewards(seed)
    leaves = chosen.requires_grad_(), rejected.requires_grad_()
    loss = bradley_terry_loss(*leaves, margin, center_coefficient=coefficient)
    gradients = torch.autograd.grad(loss.sum(), leaves)
    arrays = [tensor.detach().numpy() for tensor in (*leaves, margin)]
    for found, expected in zip((loss.detach(), *gradients), oracle_pairs(*arrays, coefficient), strict=True):
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")
@pytest.mark.parametrize("coefficient", [None, 0.05])
@pytest.mark.parametrize("has_margin", [False, True])
def test_mean_over_pairs_is_trls_loss_with_its_metrics(coefficient: float | None, has_margin: bool) -> None:
    with mock.patch.dict(os.environ):  # importing TRL sets variables
        from trl.trainer.reward_trainer import RewardTrainer
    metrics: dict = defaultdict(list)
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(center_rewards_coefficient=coefficient),
        accelerator=SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x),
        _metrics={"train": metrics},
        _total_train_tokens=0,
        _tp_size=1,
    )
    chosen, rejected, margin = make_rewards(5)
    logits = torch.cat([chosen, rejected])[:, None].requires_grad_()  # TRL's batch: all chosen, then all rejected
    inputs = {"attention_mask": torch.ones(2 * N, 1), **({"margin": margin} if has_margin else {})}
    theirs = RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=logits), inputs)
    (gradient,) = torch.autograd.grad(theirs, logits)

    leaves = chosen.requires_grad_(), rejected.requires_grad_()
    ours = bradley_terry_loss(
        *leaves, margin if has_margin else torch.zeros_like(margin), center_coefficient=coefficient or 0.0
    ).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    np.testing.assert_allclose(torch.cat(torch.autograd.grad(ours, leaves)), gradient[:, 0], rtol=1e-12, atol=1e-14)
    assert metrics["accuracy"] == [pytest.approx((chosen > rejected).double().mean().item())]


def test_refuses_other_shapes_and_a_negative_coefficient() -> None:
    two, three = torch.zeros(2), torch.zeros(3)
    with pytest.raises(ValueError, match="3 rewards"):
        bradley_terry_loss(three, two, two)
    with pytest.raises(ValueError, match=r"-0\.1"):
        bradley_terry_loss(two, two, two, center_coefficient=-0.1)
    with pytest.raises(ValueError, match="shape"):
        label_loss(torch.zeros(2, 2), torch.zeros(3, 2), is_restricted=True)


def test_restricted_label_loss_does_not_depend_on_what_the_other_tokens_get() -> None:
    # Label probabilities 0.3 and 0.1 of the vocabulary are 3/4 and 1/4 of the two.
    logprobs, target = torch.tensor([[0.3, 0.1]]).log(), torch.tensor([[1.0, 0.0]])
    assert label_loss(logprobs, target, is_restricted=True).tolist() == pytest.approx([-math.log(0.75)])
    assert label_loss(logprobs - 5, target, is_restricted=True).tolist() == pytest.approx([-math.log(0.75)])
    assert label_loss(logprobs, target, is_restricted=False).tolist() == pytest.approx([-math.log(0.3)])


@pytest.mark.parametrize("is_restricted", [True, False])
@pytest.mark.parametrize("is_soft", [True, False])
def test_label_loss_and_gradient_of_logits_are_the_formulas(is_restricted: bool, is_soft: bool) -> None:
    """From whole logits, as OpenRLHF's PRMLoss takes them: softmax minus target, over the labels or the vocabulary."""
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=(N, 11)) * 3, [7, 2]
    right = rng.uniform(size=N) if is_soft else rng.integers(0, 2, size=N).astype(float)
    target = np.stack([right, 1 - right], axis=1)
    leaf = torch.tensor(logits, requires_grad=True)
    loss = label_loss(leaf.log_softmax(dim=-1)[:, labels], torch.tensor(target), is_restricted=is_restricted)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)

    counted = labels if is_restricted else list(range(11))
    exponentials = np.exp(logits[:, counted])
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    full_target = np.zeros_like(logits)
    full_target[:, labels] = target
    expected = np.zeros_like(logits)
    expected[:, counted] = probabilities - full_target[:, counted]
    value = -(full_target[:, counted] * np.log(probabilities)).sum(axis=1)
    np.testing.assert_allclose(loss.detach().numpy(), value, rtol=1e-6)
    np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6, atol=1e-9)
