"""Run a trainer of a policy and a critic that takes steps, saves, and goes on from what it saved."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from coati_rl.algorithms.gae import TokenReturns
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.algorithms.token_advantages import sample_parts
from coati_rl.algorithms.value_loss import ValueLoss
from coati_rl.batch import MicroBatch, MiniBatch
from consumer.backend import Backend
from consumer.objectives.actor_critic import ActorCritic
from consumer.optim.learning_rate import LearningRate
from consumer.role_models import RoleModel
from consumer.train_step import TrainStep
from tests.integration.consumer.conftest import EVERY_LAYOUT, LEARNING_RATE
from tests.integration.consumer.gradient_process import mini_batches_of, share_of
from tests.integration.consumer.losses import Cut
from tests.integration.consumer.samples import samples_near, scale_of, to_mini_batch
from tests.integration.consumer.trainer import make_trainer

DISCOUNT, TRACE, CRITIC_RATE, CLIP = 0.98, 0.9, 3.0, 0.05
OBJECTIVE = ActorCritic(
    loss=PolicyLoss(),
    value_loss=ValueLoss(clip=CLIP),
    token_returns=TokenReturns(discount=DISCOUNT, trace=TRACE),
    critic_rate=CRITIC_RATE,
)
CASE: Any = SimpleNamespace(unit=1, aggregation="token_level")
VALUE = "value"  # the directory of the critic's start, in that of the policy


class Trial(NamedTuple):
    """A layout in a precision, samples of a kind, and how they are cut; of a policy with a tied LM head or not."""

    layout: str
    precision: str
    kind: str
    cut: Cut
    is_tied: bool = True

    @property
    def name(self) -> str:
        cut, head = "-".join(map(str, self.cut)), "" if self.is_tied else "-untied"
        return f"{self.layout}-{self.precision}-{self.kind}-{cut}{head}"

    def model_dir(self, models: Path) -> Path:
        return models / ("tied" if self.is_tied else "untied")


def reward_of(token_ids: np.ndarray) -> np.ndarray:
    """The reward of a token, which is any number that does not depend on how samples are cut."""
    return ((token_ids % 7) - 3) * np.float32(0.1)


def with_rewards(micro_batch: MicroBatch) -> MicroBatch:
    """Samples whose last token is odd are cut by a limit."""
    arrays = micro_batch.loss_arrays
    rewards = np.where(arrays["loss_mask"], reward_of(arrays["token_ids"]), 0).astype(np.float32)
    is_cut = np.zeros_like(rewards)
    for row, part in sample_parts(arrays["sample_index"]):
        if (counted := np.flatnonzero(arrays["loss_mask"][row, part])).size:
            is_cut[row, part] = arrays["token_ids"][row, part.start + counted[-1]] % 2
    return micro_batch.with_arrays(token_rewards=rewards, is_cut=is_cut)


class Recorder:
    """A backend that keeps the whole gradients and norms of both models, and the sums that were reduced last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.taken: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def optimizer_step(self, *, loss_scale: float, role: str, **settings: Any) -> float:
        self._backend.reduce_gradients(role)
        model = self._backend.models[role]
        self.taken[f"{role} gradients"] = {
            name: model.parameters.full_state(name, gradient).clone() * loss_scale
            for name, gradient in model.gradients.items()
        }
        norm = self._backend.optimizer_step(loss_scale=loss_scale, role=role, **settings)
        self.taken[f"{role} norm"] = norm
        return norm


def batches_of(backend: Backend, model_dir: Path, trial: Trial, step: int) -> Sequence[MiniBatch]:
    samples = samples_near(model_dir, step, kind=trial.kind)
    scale, parts = scale_of(samples, CASE.aggregation), mini_batches_of(samples, trial.cut.split, 1)
    return [
        to_mini_batch(
            [with_rewards(each) for each in share_of(part, backend, CASE, trial.cut)],
            step=step,
            is_last=number == len(parts),
            scale=scale,
        )
        for number, part in enumerate(parts, 1)
    ]


def weights_of(model: RoleModel) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.export(torch.float32)}


def take_steps(rank: int, out_dir: Path, models: Path, trials: Sequence[Trial]) -> None:
    """Two steps of each trial with a checkpoint between them, and the second one again from it."""
    for trial in trials:
        model_dir = trial.model_dir(models)
        saved, steps = out_dir / trial.name / "step-1", list[dict[str, Any]]()
        backend = make_trainer(
            model_dir, value_dir=model_dir / VALUE, precision=trial.precision, **EVERY_LAYOUT[trial.layout][1]
        )
        for step in range(2):
            if step == 1:
                backend.save(saved, state={"step": 1})
            steps.append(take_step(backend, model_dir, trial, step))
        backend.close()
        again = make_trainer(
            saved,
            value_dir=saved / VALUE,
            tokenizer_dir=model_dir,
            precision=trial.precision,
            **EVERY_LAYOUT[trial.layout][1],
        )
        again.restore(saved)
        resumed = take_step(again, model_dir, trial, 1)
        again.close()
        torch.save({"steps": steps, "resumed": resumed}, out_dir / f"{trial.name}-rank{rank}.pt")


def take_step(backend: Backend, model_dir: Path, trial: Trial, step: int) -> dict[str, Any]:
    recorder = Recorder(backend)
    train_step = TrainStep(recorder, OBJECTIVE, learning_rate=LearningRate(peak=LEARNING_RATE))
    metrics: dict[str, Any] | None = None
    for batch in batches_of(backend, model_dir, trial, step):
        metrics = train_step.run(batch)
    weights = {role: weights_of(backend.models[role]) for role in ("policy", "value")}
    return {**recorder.taken, "metrics": metrics, "weights": weights}
