"""The configuration of jobs on a dataset, which have no producers; the jobs are in `offline_jobs`."""

from typing import Any, ClassVar

from pydantic import field_validator

from coati_rl.config.fields import Section, execution, experiment
from coati_rl.config.training import TrainingConfig

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

    JOB: ClassVar[str]  # the command's name
    UNIT: ClassVar[int] = 1  # samples that a row makes, which are compared in the loss

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
