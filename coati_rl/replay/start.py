"""Find the weights that a replay begins with, and train from there to the step that is asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from coati_rl.checkpoint.directory import checkpoints_in, step_of
from coati_rl.config.kept_weights import DIRECTORY as KEPT_WEIGHTS
from coati_rl.config.training import TrainingConfig
from coati_rl.errors import ConfigError
from coati_rl.replay.parts import Parts
from coati_rl.replay.training import RecomputedTraining, StepBatch
from coati_rl.run_reader.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Name weights of a run that are on the disk."""

    directory: Path
    step: int  # optimizer steps taken on them
    is_initial: bool  # the model that the run began with, and no checkpoint
    can_train: bool = True  # False: of --keep-weights, without the optimizer's state


def starts_of(run: RunDirectory, config: TrainingConfig) -> list[Start]:
    """Return the weights that are on the disk, by their steps; checkpoints before other weights of the same step."""
    kept = [
        Start(directory=path, step=step_of(path), is_initial=False, can_train=False)
        for path in checkpoints_in(run.path / KEPT_WEIGHTS)
    ]
    return sorted([*_trainable(run, config), *kept], key=lambda each: each.step)  # stable


def _trainable(run: RunDirectory, config: TrainingConfig) -> list[Start]:
    found = {each["step"]: Path(each["checkpoint"]) for each in run.resumptions()}  # some are deleted by now
    found |= {step_of(path): path for path in run.checkpoints()}
    saved = [Start(directory=path, step=step, is_initial=False) for step, path in found.items() if path.is_dir()]
    has_first_step = next(run.iterate_steps(), {}).get("step") == 1  # of one resumed elsewhere it is not here
    return [Start(directory=Path(config.model.model), step=0, is_initial=True), *saved] if has_first_step else saved


def nearest(starts: list[Start], step: int, *, takes_kept: bool) -> Start:
    """Return the newest weights of at most so many optimizer steps from which the step can be computed.

    Args:
        starts: of the run.
        step: optimizer steps taken.
        takes_kept: weights without the optimizer's state do, if they are of this very step.
    Raises: ConfigError if there are none.
    """
    before = [each for each in starts if each.step <= step and each.can_train]
    kept = [each for each in starts if each.step == step] if takes_kept else []
    if kept:
        return kept[0]
    if not before:
        raise ConfigError(
            f"--step {step + 1}: no weights from before this step are on the disk; the oldest are of step "
            f"{starts[0].step if starts else 'none'}"
        )
    return before[-1]


class Retraining:
    """Train from a start to the step that is replayed, with the learning rates that the run has recorded."""

    def __init__(
        self,
        parts: Parts,
        config: TrainingConfig,
        start: Start,
        precision: torch.dtype,
        *,
        batch_of: Callable[[int], StepBatch],
        first_of: Callable[[int], int],
        old_period: int,
    ) -> None:
        """Load the models.

        Args:
            parts: of the project.
            config: of the run.
            start: the weights.
            precision: that the trainers compute in.
            batch_of: optimizer steps taken to the next step's content.
            first_of: optimizer steps taken to those at the first update on the same batch.
            old_period: optimizer steps between two copies of the policy that scores old log-probabilities.
        """
        self.training = RecomputedTraining(
            parts, config, start.directory, precision, is_initial=start.is_initial, can_train=start.can_train
        )
        self._batch_of, self._first_of, self._old_period = batch_of, first_of, old_period
        self._kept: dict[int, tuple[StepBatch, Mapping[str, torch.Tensor]]] = {}
        self.first_step = self.step = start.step
        self.can_train = start.can_train

    def advance(self, step: int, learning_rate_of: Callable[[int], float]) -> None:
        """Train until so many optimizer steps are taken."""
        while self.step < step:
            batch, sums = self.batch()
            result = self.training.result_of(batch, sums)
            self.training.update(batch, result, learning_rate_of(self.step + 1))
            self.step += 1

    def batch(self) -> tuple[StepBatch, Mapping[str, torch.Tensor]]:
        """Return the next step's content with its targets, and the sums that these report."""
        if self.step % self._old_period == 0:
            self.training.keep_old_policy()
        first = self._first_of(self.step)
        if first not in self._kept:
            self._kept = {at: kept for at, kept in self._kept.items() if at >= self.step - self._old_period}
            self._kept[first] = self.training.with_targets(self._batch_of(first))
        batch, sums = self._kept[first]
        return (batch if first == self.step else replace(batch, step=self.step, without_targets=())), sums
