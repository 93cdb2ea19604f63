"""Compute the learning rate of an optimizer step from the run's progress and the steps taken.

Progress is the completed share of the run, in [0, 1]: filtering makes the number of steps unknown, so schedules are
functions of progress. Warm-up in steps is converted with the steps and the progress so far.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.own_optimizer import Schedule, load_schedule


def cosine(progress: float) -> float:
    """Return (1 + cos(pi * progress)) / 2: half a cosine from 1 to 0. Source: arXiv:1608.03983 eq. 5, one cycle."""
    return (1 + math.cos(math.pi * progress)) / 2


def linear(progress: float) -> float:
    """Return 1 - progress."""
    return 1 - progress


def constant(progress: float) -> float:
    """Return 1."""
    return 1.0


SCHEDULES: Mapping[str, Schedule] = {"cosine": cosine, "linear": linear, "constant": constant}


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningRate:
    """Rise linearly from 0 to the peak during warm-up, then follow the schedule to `min_ratio` times the peak."""

    peak: float
    schedule: Schedule = cosine  # from the progress after warm-up, in [0, 1]
    min_ratio: float = 0.1  # of the peak, at the end of the run
    warmup_ratio: float = 0.0  # of the run
    warmup_steps: int = 0  # optimizer steps; at most one of the two is set

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.min_ratio <= 1:
            raise ValueError(f"min_ratio = {self.min_ratio} must lie in [0, 1]")
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"warmup_ratio = {self.warmup_ratio} must lie in [0, 1)")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(f"warmup_ratio = {self.warmup_ratio} and warmup_steps = {self.warmup_steps}: give one")

    def at(self, progress: float, *, step: int) -> float:
        """Return peak * progress / w during warm-up, then peak * (m + (1 - m) * schedule((progress - w) / (1 - w))).

        m is `min_ratio`, w the share of the run that is warm-up. With `warmup_steps` W it is W * progress / step, as
        though the other steps took as much of the run as those so far. If all steps do, these are the rates of
        transformers' schedules with warm-up, the first of which is 0.

        Args:
            progress: completed share of the run; values above 1 count as 1, the end of the schedule.
            step: optimizer steps taken.
        Returns: the learning rate of the next optimizer step.
        Raises: ValueError if progress is negative or NaN.
        """
        if not progress >= 0:
            raise ValueError(f"progress = {progress} must not be negative")
        progress = min(progress, 1.0)
        if step < self.warmup_steps:
            return self.peak * (step / self.warmup_steps)
        warmup = self.warmup_steps * progress / step if self.warmup_steps else self.warmup_ratio
        if progress < warmup:
            return self.peak * (progress / warmup)
        after = (progress - warmup) / (1 - warmup) if warmup < 1 else 1.0
        return self.peak * (self.min_ratio + (1 - self.min_ratio) * self.schedule(after))


def learning_rate(config: OptimizerConfig) -> LearningRate:
    """Return the learning rate that the settings describe."""
    built_in = SCHEDULES.get(config.lr_schedule)
    return LearningRate(
        peak=config.learning_rate,
        schedule=load_schedule(config.lr_schedule) if built_in is None else built_in,
        min_ratio=0.0 if built_in is None else config.min_lr_ratio,
        warmup_ratio=config.warmup_ratio,
        warmup_steps=config.warmup_steps,
    )
