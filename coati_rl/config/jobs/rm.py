"""Define the training of a reward model on pairs."""

from typing import ClassVar

from coati_rl.config.fields import Section, experiment
from coati_rl.config.jobs.common import RewardOptimizerConfig, project
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_data import PairDataConfig
from coati_rl.config.training import TrainingRunConfig


class RewardModelConfig(Section):
    """Bradley-Terry loss of a reward model; a row's margin is in its column `margin`."""

    center_rewards_coefficient: float = experiment(
        0.0, "Weight of (r_chosen + r_rejected)^2 in the loss, which keeps rewards around 0; 0.01 is usual.", ge=0
    )


class RmRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = project("RM")


class RmJobConfig(OfflineConfig):
    """The settings of a reward model's training."""

    COMMAND: ClassVar[str] = "coati-rl rm"
    SUMMARY: ClassVar[str] = "Train a reward model on pairs of a chosen and a rejected completion (Bradley-Terry)."
    JOB: ClassVar[str] = "rm"
    SAMPLES: ClassVar[str] = "coati_rl.reading.reward_samples:rm_samples"
    OBJECTIVE: ClassVar[str] = "consumer.objectives.pairwise:of_job"
    UNIT: ClassVar[int] = 2
    HAS_SCALAR_HEAD: ClassVar[bool] = True

    data: PairDataConfig = PairDataConfig()
    objective: RewardModelConfig = RewardModelConfig()
    optimizer: RewardOptimizerConfig = RewardOptimizerConfig()
    run: RmRunConfig = RmRunConfig()

    @property
    def objective_text(self) -> str:
        weight = self.objective.center_rewards_coefficient
        return f"Bradley-Terry of pairs{f', rewards centred with weight {weight:g}' if weight else ''}"
