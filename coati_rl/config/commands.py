"""Name the commands that have a configuration, with the configuration of each."""

from coati_rl.config.config import Config
from coati_rl.config.fields import described, spelling
from coati_rl.config.generate import GenerateConfig
from coati_rl.config.jobs.dpo import DpoJobConfig
from coati_rl.config.jobs.kto import KtoJobConfig
from coati_rl.config.jobs.prm import PrmJobConfig
from coati_rl.config.jobs.rm import RmJobConfig
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.config.jobs.value import ValueJobConfig
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.sections import JobConfig
from coati_rl.config.serve import ServeConfig
from coati_rl.config.training import TrainingConfig

_JOBS: tuple[type[OfflineConfig], ...] = (
    SftJobConfig, RmJobConfig, DpoJobConfig, KtoJobConfig, PrmJobConfig, ValueJobConfig,
)  # fmt: skip
OFFLINE: dict[str, type[OfflineConfig]] = {job.JOB: job for job in _JOBS}
TRAINING: dict[str, type[TrainingConfig]] = {"rl": Config, **OFFLINE}
ALL: dict[str, type[JobConfig]] = {**TRAINING, "generate": GenerateConfig, "serve": ServeConfig}


def commands_with(flag: str) -> list[str]:
    """Return the commands that have a flag, in its short or long form; hyphens and underscores are the same."""
    return [
        name
        for name, config in ALL.items()
        if any(
            flag.replace("_", "-") in (spelling(key, field).replace("_", "-"), described(field, "short"))
            for key, field in config.fields().items()
        )
    ]
