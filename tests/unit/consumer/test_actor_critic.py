"""Test a step of policy and critic: rates and scales of both, and that values are scored before either is trained."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coati_rl.algorithms.gae import TokenReturns
from coati_rl.algorithms.value_loss import ValueLoss
from consumer.objectives.actor_critic import ActorCritic
from consumer.optim.learning_rate import LearningRate
from consumer.train_step import TrainStep
from tests.unit.consumer.test_train_step import ScriptedBackend, batch, seen

Steps = dict[str, list[tuple[float, float]]]


class TwoModels(ScriptedBackend):
    """Notes which model is trained and stepped; a critic's value of every token is 0.25."""

    def __init__(self) -> None:
        super().__init__()
        self.by_role: Steps = {"policy": [], "value": []}

    def score(self, micro_batches: Any, model: str = "policy", output: str = "scores") -> Any:
        scores = super().score(micro_batches, "policy" if model == "value" else model)
        self.calls[-1] = f"score {model}"
        return [each.fill_(0.25) for each in scores] if model == "value" else scores

    def forward_backward(self, mini_batch: Any, loss_fn: object, role: str = "policy") -> Any:
        sums = super().forward_backward(mini_batch, loss_fn, role)
        self.calls[-1] = f"train {role}"
        return sums

    def optimizer_step(self, *, loss_scale: float, learning_rate: float, role: str) -> float:
        self.by_role[role].append((loss_scale, learning_rate))
        return {"policy": 0.5, "value": 0.75}[role]


def valued(step: int, **settings: Any) -> Any:
    made = batch(step, **settings)
    (only,) = made.micro_batches
    mask = only.loss_arrays["loss_mask"]
    rewards = np.where(mask, np.float32(1), np.float32(0))
    arrays = {"token_rewards": rewards, "is_cut": np.zeros_like(rewards)}
    return replace(made, micro_batches=(only.with_arrays(**arrays),))


def train_step(backend: TwoModels, **settings: Any) -> TrainStep:
    objective = ActorCritic(
        loss=lambda *_: None, value_loss=ValueLoss(), token_returns=TokenReturns(trace=1.0), **settings
    )
    return TrainStep(backend, objective, learning_rate=LearningRate(peak=0.1))


@pytest.fixture(autouse=True)
def no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActorCritic, "metrics", lambda *_, **__: {})


def test_the_critic_has_a_multiple_of_the_rate_and_its_own_norm() -> None:
    backend = TwoModels()
    metrics = train_step(backend, critic_rate=4.0).run(valued(0))
    assert backend.by_role == {"policy": [(0.25, 0.1)], "value": [(0.25, 0.4)]}
    assert metrics is not None
    assert (metrics["grad_norm"], metrics["value_grad_norm"], metrics["learning_rate"]) == (0.5, 0.75, 0.1)


def test_the_policy_stands_still_in_the_warm_up_and_its_gradient_is_dropped() -> None:
    backend = TwoModels()
    step = train_step(backend, critic_warmup=2)
    for number in range(3):
        step.run(valued(number))
    assert backend.by_role["policy"] == [(0.0, 0.0), (0.0, 0.0), (0.25, 0.1)]
    assert backend.by_role["value"] == [(0.25, 0.1)] * 3


def test_values_are_scored_once_before_both_models_are_trained_on_what_follows_from_them() -> None:
    backend = TwoModels()
    train_step(backend).run(valued(0))
    assert backend.calls == ["score value", "train policy", "train value"]
    assert seen(backend, "advantages")[0] == pytest.approx([2.75, 1.75, 0.75])  # rewards to go less 0.25
    assert seen(backend, "returns")[1] == pytest.approx([3.0, 2.0, 1.0])
    assert seen(backend, "old_values")[1] == [0.25] * 3
