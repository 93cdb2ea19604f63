"""Declare what a replay needs of packages above this one: objectives, models, rewards; `coati.replay` has them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from coati_rl.batch import MicroBatch
from coati_rl.config import Config
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.preflight.prompts import EnvironmentFacts, RewardFacts
from coati_rl.protocols import GroupScorer, LossFn, Role


class StepObjective(Protocol):
    """See `consumer.objectives.objective.Objective`, of which a replay uses these members."""

    @property
    def losses(self) -> Mapping[Role, LossFn]: ...

    @property
    def scores(self) -> Mapping[str, Role]: ...

    @property
    def entropies(self) -> Mapping[str, Role]: ...

    @property
    def needs_whole_step(self) -> bool: ...

    def rate_of(self, role: Role, step: int) -> float: ...

    def num_steps(self, role: Role) -> int: ...

    def reference_mix(self, step: int) -> float: ...

    def targets(self, micro_batches: tuple[MicroBatch, ...]) -> tuple[tuple[MicroBatch, ...], dict[str, Tensor]]: ...

    def with_whole_step(
        self, micro_batches: Sequence[MicroBatch], reduce: Callable[[dict[str, Tensor]], dict[str, float]]
    ) -> Sequence[MicroBatch]: ...

    def end_step(self, sums: Mapping[str, float]) -> None: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayModel:
    """Hold a model in plain transformers, on the CPU, in more digits than the run's."""

    module: nn.Module
    trained: Mapping[str, nn.Parameter]  # by their names in the record of gradients; none of a frozen model
    scalar_head: nn.Module | None = None  # in place of the LM head
    has_adapters: bool = False
    # Of routes, uint[1, T, D, K], the argument `routing` of a forward that replays them; None: routers choose.
    routing: Callable[[np.ndarray], Any] | None = None


class Optimizer(Protocol):
    """Update the float32 masters of a model."""

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """Return the masters by name; a step changes them."""

    def step(self, gradients: Mapping[str, Tensor], settings: OptimizerConfig, learning_rate: float) -> None:
        """Take a step on scaled and clipped gradients, and give the model its new weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """Hold what is made by packages above this one."""

    objective_of: Callable[[TrainingConfig], StepObjective]
    # (config, directory of the policy's weights, precision) to the models by role.
    load_models: Callable[[TrainingConfig, Path, torch.dtype], Mapping[Role, ReplayModel]]
    # (config, role, model, checkpoint or None: no step was taken, precision) to the model's optimizer.
    make_optimizer: Callable[[TrainingConfig, Role, ReplayModel, Path | None, torch.dtype], Optimizer]
    open_scorer: Callable[[Config], GroupScorer]
    rewards: RewardFacts
    environment: Callable[[Config], EnvironmentFacts]
