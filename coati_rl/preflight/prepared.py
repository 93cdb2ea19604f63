"""Hold the inputs of a job that the driver needs, whatever the job is."""

from collections.abc import Callable
from dataclasses import dataclass

from coati_rl.checkpoint.resumed_run import ResumedRun
from coati_rl.config.plan import TrainingPlan
from coati_rl.config.training import TrainingConfig


def unchecked(gpu_bytes: int) -> None:
    """Check nothing; the coordinator, too, gets this in place of a check whose modules import torch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedJob:
    """Hold a checked configuration, its plan and, with -cp, where the run continues."""

    config: TrainingConfig  # with the model as a directory
    plan: TrainingPlan
    warnings: tuple[str, ...]
    resume: ResumedRun | None = None  # -cp: where the run continues
    check_gpus: Callable[[int], object] = unchecked  # raises ConfigError if GPUs of so many bytes are small
