"""Test how a train step prepares mini-batches for the loss, with a plain torch backend."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.config import Config
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.objectives.run_objective import policy_gradient
from consumer.optim.learning_rate import LearningRate
from consumer.train_step import TrainStep
from tests.unit.consumer.conftest import make_micro_batch

OLD, NEW, REFERENCE = -1.0, -2.0, -1.5  # log-probability of every token under each model


REPORTED = ("loss_sum", "num_tokens", "gap_tokens", "gap_sum", "gap_max", "ratio_max", "old_gap_max", "old_gap_sum")


class ScriptedBackend:
    """Notes what it is asked for; the weights of version N give every token NEW - N / 10."""

    def __init__(self, *, has_head: bool = True) -> None:
        self.has_head = has_head
        self.calls: list[str] = []
        self.trained: list[MiniBatch] = []
        self.version = 0
        self.kept: int | None = None
        self.steps: list[tuple[float, float]] = []  # loss scale and learning rate of each

    def score(self, micro_batches: Sequence[MicroBatch], model: str = "policy", output: str = "scores") -> list[Tensor]:
        self.calls.append(f"score {model}")
        versions = {"policy": self.version, "old": self.kept}
        value = REFERENCE if model == "reference" else NEW - versions[model] / 10
        return [torch.full(m.token_ids.shape, value) for m in micro_batches] if self.has_head else []

    def keep_old_policy(self) -> None:
        self.calls.append("keep")
        self.kept = self.version

    def forward_backward(self, mini_batch: MiniBatch, loss_fn: object, role: str = "policy") -> dict[str, Tensor]:
        self.calls.append("train")
        self.trained.append(mini_batch)
        return {name: torch.tensor(2.0, dtype=torch.float64) for name in REPORTED} if self.has_head else {}

    def router_metrics(self) -> dict[str, float | None]:
        return {}

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return {name: float(value) for name, value in sums.items()} if self.has_head else {}

    def optimizer_step(self, *, loss_scale: float, learning_rate: float, role: str) -> float:
        self.version += 1
        self.steps.append((loss_scale, learning_rate))
        return 0.5

    @property
    def models(self) -> dict[str, "ScriptedBackend"]:
        return {"policy": self}

    def forget_gradients(self) -> None:
        self.calls.append("forget")


def batch(step: int = 0, *, advantage: float = 1.0, is_last: bool = True, loss_scale: float = 0.25) -> MiniBatch:
    """One sample: two prompt and three response tokens."""
    micro_batch = make_micro_batch(([1, 2, 3, 4, 5], 2))
    loss_mask = micro_batch.loss_arrays["loss_mask"]
    advantages = np.where(loss_mask, np.float32(advantage), np.float32(0))
    rollout = np.where(loss_mask, np.float32(OLD), np.float32(0))
    return MiniBatch(
        step=step,
        micro_batches=(micro_batch.with_arrays(advantages=advantages, rollout_logprobs=rollout),),
        is_last=is_last,
        loss_scale=loss_scale,
        learning_rate_progress=0.0,
    )


def step_of(backend: ScriptedBackend, **settings: Any) -> TrainStep:
    return TrainStep(backend, PolicyGradient(loss=lambda *_: None, **settings), learning_rate=LearningRate(peak=0.1))


def seen(backend: ScriptedBackend, name: str) -> list[list[float]]:
    """An array's values on response tokens, by mini-batch that was trained."""
    micro_batches = [mini_batch.micro_batches[0] for mini_batch in backend.trained]
    return [m.loss_arrays[name][m.loss_arrays["loss_mask"]].tolist() for m in micro_batches]


def test_a_step_is_taken_with_the_scale_of_its_last_mini_batch_and_the_rate_of_its_progress() -> None:
    backend = ScriptedBackend()
    step = step_of(backend)
    assert step.run(batch(is_last=False, loss_scale=1.0)) is None
    assert backend.steps == []
    metrics = step.run(replace(batch(loss_scale=0.25), learning_rate_progress=0.5))
    assert backend.steps == [(0.25, pytest.approx(0.1 * (0.1 + 0.9 / 2)))]
    assert metrics["learning_rate"] == backend.steps[0][1]


def test_without_recomputation_nothing_is_scored_and_the_old_gap_is_unknown() -> None:
    backend = ScriptedBackend()
    metrics = step_of(backend).run(batch())
    assert backend.calls == ["train"]
    assert backend.trained[0].micro_batches[0].loss_arrays.get("old_logprobs") is None
    assert metrics["old_logprob_gap_mean"] is None and metrics["old_logprob_gap_max"] is None
    assert metrics["loss"] == 2.0 * 0.25


def test_with_a_sync_every_step_old_logprobs_are_those_of_the_policy_before_the_step() -> None:
    backend = ScriptedBackend()
    train_step = step_of(backend, old_policy_period=1)
    for step in range(2):
        assert train_step.run(batch(step))["old_logprob_gap_mean"] == 1.0
    assert backend.calls == ["score policy", "train"] * 2
    assert seen(backend, "old_logprobs") == [pytest.approx([-2.0] * 3), pytest.approx([-2.1] * 3)]


def test_over_several_steps_old_logprobs_are_those_of_the_policy_at_the_last_sync() -> None:
    backend = ScriptedBackend()
    train_step = step_of(backend, old_policy_period=2)
    for step in range(4):
        train_step.run(batch(step))
    assert [call for call in backend.calls if call in ("keep", "train")] == ["keep", "train", "train"] * 2
    assert seen(backend, "old_logprobs") == [pytest.approx([value] * 3) for value in (-2.0, -2.0, -2.2, -2.2)]


def test_resumed_between_two_syncs_the_old_policy_is_the_checkpoints_until_the_next_one() -> None:
    backend = ScriptedBackend()
    train_step = step_of(backend, old_policy_period=3)
    for step in (4, 5, 6):
        train_step.run(batch(step))
    assert [call for call in backend.calls if call in ("keep", "train")] == ["keep", "train", "train", "keep", "train"]


def test_kl_in_the_reward_is_taken_off_every_token_up_to_the_samples_end() -> None:
    backend = ScriptedBackend()
    settings = {"has_reference": True, "reward_kl_coeff": 0.1, "kl_estimator": "k1"}
    metrics = step_of(backend, **settings).run(batch())
    # k1 = -1 - -1.5 = 0.5 a token; 0.1 of it three, two and one times.
    assert seen(backend, "advantages") == [pytest.approx([0.85, 0.9, 0.95])]
    assert metrics["kl_mean"] == 1.5 / 2.0  # over the two tokens that the loss says it has


def test_kl_in_the_reward_is_clamped_token_by_token() -> None:
    backend = ScriptedBackend()
    settings = {"has_reference": True, "reward_kl_coeff": 0.1, "kl_estimator": "k1", "kl_clamp": 0.25}
    step_of(backend, **settings).run(batch())
    assert seen(backend, "advantages") == [pytest.approx([0.925, 0.95, 0.975])]  # 0.25 a token, not 0.5


def test_kl_in_the_reward_is_of_the_recomputed_old_policy_where_there_is_one() -> None:
    backend = ScriptedBackend()
    settings = {"has_reference": True, "reward_kl_coeff": 0.1, "kl_estimator": "k1", "old_policy_period": 1}
    step_of(backend, **settings).run(batch())
    assert seen(backend, "advantages") == [pytest.approx([1.15, 1.1, 1.05])]  # k1 = -2 - -1.5


def test_whitening_waits_for_the_last_mini_batch_and_is_over_all_tokens_of_the_step() -> None:
    backend = ScriptedBackend()
    train_step = step_of(backend, whitens=True)
    assert train_step.run(batch(advantage=3.0, is_last=False)) is None
    assert backend.calls == []
    assert train_step.run(batch(advantage=1.0)) is not None
    assert [mini_batch.is_last for mini_batch in backend.trained] == [False, True]
    assert seen(backend, "advantages") == [pytest.approx([1.0] * 3), pytest.approx([-1.0] * 3)]


def test_whitened_advantages_that_are_all_equal_are_exactly_zero() -> None:
    backend = ScriptedBackend()
    train_step = step_of(backend, whitens=True)
    train_step.run(batch(advantage=0.7, is_last=False))
    train_step.run(batch(advantage=0.7))
    assert seen(backend, "advantages") == [[0.0] * 3] * 2


def test_a_rank_without_the_lm_head_takes_part_in_everything_and_changes_nothing() -> None:
    backend = ScriptedBackend(has_head=False)
    settings = {"has_reference": True, "reward_kl_coeff": 0.1, "old_policy_period": 2, "whitens": True}
    metrics = step_of(backend, **settings).run(batch())
    assert backend.calls == ["keep", "score old", "score reference", "train"]
    assert seen(backend, "advantages") == [[1.0] * 3]
    assert set(metrics) >= {"grad_norm", "learning_rate", "train_s"}
    assert "loss" not in metrics


def test_a_step_without_samples_has_metrics_without_means() -> None:
    class Empty(ScriptedBackend):
        def forward_backward(self, mini_batch: MiniBatch, loss_fn: object, role: str) -> dict[str, Tensor]:
            return {name: value * 0 for name, value in super().forward_backward(mini_batch, loss_fn, role).items()}

    empty = replace(batch(), micro_batches=(), loss_scale=0.0)
    metrics = step_of(Empty(), whitens=True).run(empty)
    assert metrics["loss"] is None and metrics["entropy_mean"] is None and metrics["logprob_gap_max"] is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, {"has_reference": True}),
        ({"kl_coeff": 0}, {}),
        ({"algo": "REINFORCE_PP"}, {"has_reference": True, "reward_kl_coeff": 0.01, "kl_estimator": "k1"}),
        ({"kl_coeff": 0, "old_logprobs": "trainer"}, {"old_policy_period": 2}),
        ({"kl_coeff": 0, "updates_per_batch": 3}, {"updates_per_batch": 3}),
        (
            {"kl_coeff": 0, "old_logprobs": "trainer", "updates_per_batch": 3},
            {"old_policy_period": 6, "updates_per_batch": 3},
        ),
        ({"kl_coeff": 0, "top_p": 0.9}, {"old_policy_period": 2}),
        ({"kl_clamp": 10}, {"has_reference": True, "kl_clamp": 10.0}),
        ({"kl_coeff": 0, "off_policy_correction": "tis"}, {"old_policy_period": 2}),
    ],
)
def test_settings_follow_from_the_config(flags: dict[str, Any], expected: dict[str, Any]) -> None:
    sizes = {"num_inferencer": 1, "num_trainers": 1, "inference_batch_size": 8, "train_batch_size": 4}
    config = Config(**sizes, train_minibatch_size=4, inference_microbatch_size=8, **flags)
    objective = policy_gradient(config)
    whitens = flags.get("algo") == "REINFORCE_PP"
    coeff = config.algorithm.kl_coeff
    assert objective == PolicyGradient(
        loss=objective.losses["policy"], **expected, whitens=whitens, first_kl_coeff=coeff
    )
