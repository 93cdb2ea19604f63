"""Set the rows of jobs on a dataset: their files, the columns of pairs, and how long samples may be."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from pydantic import field_validator

from coati_rl.config.data import DatasetFields
from coati_rl.config.fields import execution, experiment
from coati_rl.config.named_paths import DataSource, check_evaluation_sets, read_sources, shares_of

_EVAL_SET = "eval"  # the name of an evaluation set that is given as a path alone


def _check_no_generator(sources: Sequence[DataSource]) -> None:
    for source in sources:
        if source.is_generator:
            raise ValueError(
                f"{source.path} makes prompts, and this job trains on answers; let a model write them with coati-rl "
                "generate, and give the file here"
            )


class OfflineDataConfig(DatasetFields):
    """Training and evaluation rows."""

    dataset: str = experiment(
        "data.jsonl",
        "Training rows: a JSONL, JSON, CSV, Parquet or Arrow file, a directory of them, or owner/name[:split] of the "
        "Hugging Face hub. PATH,PATH for several, PATH=SHARE,PATH=SHARE to mix them.",
        short="-d",
        metavar="PATH",
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

    @field_validator("dataset")
    @classmethod
    def _is_paths(cls, text: str) -> str:
        sources = read_sources(text)
        shares_of(sources)  # ValueError if they are wrong
        _check_no_generator(sources)
        return text

    @field_validator("eval_dataset", mode="before")
    @classmethod
    def _name_of_one_path(cls, value: Any) -> Any:
        return {_EVAL_SET: value} if isinstance(value, str) else value

    @field_validator("eval_dataset")
    @classmethod
    def _are_evaluation_sets(cls, sets: dict[str, str] | None) -> dict[str, str] | None:
        check_evaluation_sets(sets)
        for text in (sets or {}).values():
            _check_no_generator(read_sources(text))
        return sets

    @property
    def sources(self) -> tuple[DataSource, ...]:
        """Return where the training rows come from."""
        return read_sources(self.dataset)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """Return the shares by which the sources are mixed, in their order; none if every row is drawn once."""
        return shares_of(self.sources)

    @property
    def columns(self) -> Mapping[str, str | None]:
        """Return the column of each part of a row that a flag names, by the part."""
        parts = {"prompt": "prompt", "output": "completion", "chosen": "chosen", "rejected": "rejected"}
        return {name: getattr(self, f"{key}_key", None) for key, name in {**parts, "label": "label"}.items()}


class PairDataConfig(OfflineDataConfig):
    """Training and evaluation rows: prompts with a chosen and a rejected completion."""

    chosen_key: str | None = experiment(
        None, "Column with the preferred completion; default: chosen.", metavar="COLUMN"
    )
    rejected_key: str | None = experiment(None, "Column with the other one; default: rejected.", metavar="COLUMN")
