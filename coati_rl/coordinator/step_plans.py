"""Keep what decides the mini-batches of a step, so that a coordinator that takes over builds the same ones again."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from coati_rl.batching.batcher import BatchSettings, StepBatcher
from coati_rl.estimator import load_estimator
from coati_rl.samples import RaggedBatch
from coati_rl.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Hold the groups of each mini-batch of a step so far."""

    learning_rate_progress: float
    mini_batches: list[Sequence[RolloutGroup]] = field(default_factory=list)


class StepPlans:
    """Make the batchers of steps, from 0; called under the coordinator's lock."""

    KEPT: ClassVar = ("_plans",)

    def __init__(self, settings: BatchSettings) -> None:
        self._settings = settings
        self._estimator = load_estimator(settings.advantage_estimator)
        self._plans: dict[int, StepPlan] = {}

    def begin(self, step: int, *, learning_rate_progress: float) -> StepBatcher:
        """Begin a step. Returns: its batcher."""
        self._plans[step] = StepPlan(learning_rate_progress=learning_rate_progress)
        return self._batcher(step)

    def add(self, step: int, groups: Sequence[RolloutGroup]) -> int:
        """Note the groups of a step's next mini-batch. Returns: its number, from 0."""
        self._plans[step].mini_batches.append(groups)
        return len(self._plans[step].mini_batches) - 1

    def replay(self, step: int) -> tuple[StepBatcher, list[list[RaggedBatch]]]:
        """Build a step again. Returns: its batcher, and its mini-batches so far for each dp rank."""
        batcher = self._batcher(step)
        return batcher, [batcher.add(groups) for groups in self._plans[step].mini_batches]

    def keep(self, steps: Collection[int]) -> None:
        """Drop the plans of all other steps."""
        for step in self._plans.keys() - {*steps}:
            del self._plans[step]

    def _batcher(self, step: int) -> StepBatcher:
        progress = self._plans[step].learning_rate_progress
        return StepBatcher(self._settings, step=step, learning_rate_progress=progress, estimator=self._estimator)
