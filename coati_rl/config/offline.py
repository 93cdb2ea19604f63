"""The configuration of jobs on a dataset, which have no producers; the jobs are in `offline_jobs`."""

from abc import abstractmethod
from typing import ClassVar

from coati_rl.config.offline_data import OfflineDataConfig
from coati_rl.config.training import TrainingConfig
from coati_rl.types import OfflineJob


class OfflineConfig(TrainingConfig):
    """The settings of a job on a dataset."""

    JOB: ClassVar[OfflineJob]  # the command's name
    UNIT: ClassVar[int] = 1  # samples that a row makes, which are compared in the loss

    data: OfflineDataConfig = OfflineDataConfig()

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step, over all dp groups."""
        return self.parallel.train_batch_size * self.dp

    @property
    @abstractmethod
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""

    @property
    def uses_reference(self) -> bool:
        """True if the loss compares with a reference model."""
        return False

    @property
    def reference_model(self) -> str:
        """Return the model that the loss compares with, if it does."""
        return self.model.model

    @property
    def precomputes_reference(self) -> bool:
        """True if the reference's log-probabilities are computed before the first step and kept."""
        return False

    @property
    def max_sample_tokens(self) -> int:
        """Tokens of the longest training sample."""
        return self.data.max_length
