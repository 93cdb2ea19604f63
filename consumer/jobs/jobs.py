"""Find the job that a configuration is for."""

from pathlib import Path
from typing import Any

from coati_rl.config import Config
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.protocols import Role
from consumer.backend_config import ModelSource
from consumer.jobs import offline, rl

_JOBS: dict[type, Any] = {Config: rl, OfflineConfig: offline}  # modules, by the configuration's class


def job_of(config: TrainingConfig) -> Any:
    """Return the module of `consumer.jobs` that a configuration is for."""
    return next(job for kind, job in _JOBS.items() if isinstance(config, kind))


def models_of(config: TrainingConfig, directory: Path) -> dict[Role, ModelSource]:
    """Return the models of a job by role. `directory`: of the policy; a checkpoint's to go on from it."""
    models: dict[Role, ModelSource] = job_of(config).models(config, directory)
    return models
