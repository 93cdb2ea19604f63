"""The configuration of jobs on a dataset, which have no producers: their data, and what each job adds."""

from typing import Any, ClassVar

from pydantic import field_validator

from coati_rl.config.fields import Section, execution, experiment
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.training import TrainingConfig, TrainingRunConfig

_EVAL_SET = "eval"  # the name of an evaluation set that is given as a path alone


class OfflineDataConfig(Section):
    """Training and evaluation rows."""

    dataset: str = experiment(
        "data.jsonl", "Training rows: JSONL, JSON, CSV, Parquet or Arrow.", short="-d", metavar="PATH"
    )
    eval_dataset: dict[str, str] | None = execution(
        None,
        "Held-out rows, evaluated before the first step, every -ei steps and at the end; NAME=PATH, repeated, for "
        "several sets.",
        short="-ed",
        metavar="PATH",
    )
    max_epochs: int = experiment(1, "Passes over the training rows.", short="-e", ge=1)
    max_steps: int | None = experiment(None, "Stop after this many optimizer steps, if the data lasts.", ge=1)
    max_length: int = experiment(
        2048, "Tokens of a sample; longer ones are cut at the end, or left out if nothing is left to train; counted.",
        ge=2,
    )  # fmt: skip

    @field_validator("eval_dataset", mode="before")
    @classmethod
    def _name_of_one_path(cls, value: Any) -> Any:
        return {_EVAL_SET: value} if isinstance(value, str) else value

    @field_validator("eval_dataset")
    @classmethod
    def _names_are_file_names(cls, sets: dict[str, str] | None) -> dict[str, str] | None:
        for name in sets or {}:
            if not name or "/" in name or name.startswith("."):
                raise ValueError(f"the name {name!r} names metrics: use letters and digits")
        return sets


class OfflineConfig(TrainingConfig):
    """The settings of a job on a dataset."""

    JOB: ClassVar[str] = ""  # the command's name
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
    JOB: ClassVar[str] = "sft"

    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    run: SftRunConfig = SftRunConfig()

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        return "cross-entropy of the assistant's tokens"
