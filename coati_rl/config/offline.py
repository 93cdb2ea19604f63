"""The configuration of jobs on a dataset, which have no producers; each job is a file of `config.jobs`."""

from abc import abstractmethod
from typing import Any, ClassVar

from coati_rl.config.offline_data import OfflineDataConfig
from coati_rl.config.training import TrainingConfig


class OfflineConfig(TrainingConfig):
    """The settings of a job on a dataset."""

    JOB: ClassVar[str]  # the command's name
    SAMPLES: ClassVar[str]  # "module:function" from forms of rows, a tokenizer and options to samples
    FORMS: ClassVar[str] = "coati_rl.reading.row_formats:read_forms"  # "module:function" from rows, job and columns
    OBJECTIVE: ClassVar[str]  # "module:function" from this configuration and a function that loads the tokenizer
    HAS_SCALAR_HEAD: ClassVar[bool] = False  # the trained model's, in place of the LM head
    VALUES_TOKENS: ClassVar[bool] = False  # reads that head at each token, as a critic; else once a sample

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
    def sample_options(self) -> dict[str, Any]:
        """Return the arguments of `SAMPLES` besides the length."""
        return {}

    @property
    def teacher(self) -> str | None:
        """Return the model whose whole distribution is trained on; None: there is none."""
        return self.setting("teacher", None)

    @property
    def uses_reference(self) -> bool:
        """True if the loss compares with a reference model."""
        return False

    @property
    def reference_model(self) -> str:
        """Return the model that the loss compares with, if it does."""
        return self.setting("reference_model", None) or self.model.model

    @property
    def precomputes_reference(self) -> bool:
        """True if the reference's log-probabilities are computed before the first step and kept."""
        return self.uses_reference and self.setting("precompute_reference", False)

    @property
    def max_sample_tokens(self) -> int:
        return self.data.max_length
