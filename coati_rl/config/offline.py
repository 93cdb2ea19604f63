"""The configuration of jobs on a dataset, which have no producers: their data, and what each job adds."""

from typing import ClassVar

from coati_rl.config.fields import execution, experiment
from coati_rl.config.offline_data import OfflineDataConfig, SftDataConfig
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.training import TrainingConfig, TrainingRunConfig
from coati_rl.types import OfflineJob


class OfflineConfig(TrainingConfig):
    """The settings of a job on a dataset."""

    JOB: ClassVar[OfflineJob]  # the command's name
    UNIT: ClassVar[int] = 1  # samples that a row makes, and that are compared in the loss

    data: OfflineDataConfig = OfflineDataConfig()

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all dp groups."""
        return self.parallel.train_batch_size * self.dp

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        raise NotImplementedError

    @property
    def max_sample_tokens(self) -> int:
        """Tokens of the longest training sample."""
        return self.data.max_length


class SftRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = execution("SFT", "Name of the run; the default run directory is runs/<project>.", short="-p")


class SftOptimizerConfig(OptimizerConfig):
    """Learning rate, weight decay, clipping."""

    learning_rate: float = experiment(
        2e-5, OptimizerConfig.model_fields["learning_rate"].description or "", short="-lr", gt=0
    )


class SftConfig(OfflineConfig):
    """The settings of supervised fine-tuning."""

    COMMAND: ClassVar[str] = "coati-rl sft"
    SUMMARY: ClassVar[str] = "Supervised fine-tuning: cross-entropy of the assistant's tokens."
    JOB: ClassVar[OfflineJob] = "sft"

    data: SftDataConfig = SftDataConfig()
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    run: SftRunConfig = SftRunConfig()

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        tokens = {"assistant": "the assistant's tokens", "last": "the assistant's last turn", "all": "all tokens"}
        return f"cross-entropy of {tokens[self.data.loss_on]}"
