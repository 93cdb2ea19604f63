"""Define the training of a critic on the rollouts of a run."""

from typing import Any, ClassVar

from coati_rl.config.critic import gamma_field, value_huber_field
from coati_rl.config.fields import Section, experiment
from coati_rl.config.jobs.common import RewardOptimizerConfig, project
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_data import OfflineDataConfig
from coati_rl.config.training import TrainingRunConfig


class RolloutDataConfig(OfflineDataConfig):
    """Training and evaluation rows: rollouts that a run has recorded with their token ids."""

    dataset: str = experiment(
        "rollouts",
        "Rollouts: RUN/rollouts of a run's directory, or files of it. PATH,PATH for several, PATH=SHARE,PATH=SHARE to "
        "mix them.",
        short="-d",
        metavar="PATH",
    )


class ValueConfig(Section):
    """Loss of a critic: squared error of its values against the sums of later rewards, over the tokens of a step."""

    gamma: float = gamma_field()
    value_huber: float | None = value_huber_field()


class ValueRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = project("VALUE")


class ValueJobConfig(OfflineConfig):
    """The settings of a critic's training on recorded rollouts."""

    COMMAND: ClassVar[str] = "coati-rl value"
    SUMMARY: ClassVar[str] = "Train a critic on the rollouts of a run (value pretraining), for PPO's --critic-model."
    JOB: ClassVar[str] = "value"
    FORMS: ClassVar[str] = "coati_rl.batching.recorded_rollouts:read_rollouts"
    SAMPLES: ClassVar[str] = "coati_rl.batching.value_samples:value_samples"
    OBJECTIVE: ClassVar[str] = "consumer.objectives.value_pretraining:of_job"
    HAS_SCALAR_HEAD: ClassVar[bool] = True
    VALUES_TOKENS: ClassVar[bool] = True

    data: RolloutDataConfig = RolloutDataConfig()
    objective: ValueConfig = ValueConfig()
    optimizer: RewardOptimizerConfig = RewardOptimizerConfig()
    run: ValueRunConfig = ValueRunConfig()

    @property
    def objective_text(self) -> str:
        huber, gamma = self.objective.value_huber, self.objective.gamma
        error = "squared error" if huber is None else f"Huber's error (from {huber:g} on)"
        return f"{error} of values against returns{f', discount {gamma:g}' if gamma < 1 else ''}"

    @property
    def sample_options(self) -> dict[str, Any]:
        """Return the arguments of `SAMPLES`."""
        return {"discount": self.objective.gamma}
