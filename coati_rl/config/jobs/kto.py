"""Define training on completions that are labelled desirable or undesirable."""

from typing import ClassVar, Self

from pydantic import model_validator

from coati_rl.config.fields import Section, experiment
from coati_rl.config.jobs.common import WithReference, project
from coati_rl.config.offline_data import PairDataConfig
from coati_rl.config.training import TrainingRunConfig


class LabelledDataConfig(PairDataConfig):
    """Training and evaluation rows: completions with a label, true or false, or pairs of both."""

    output_key: str | None = experiment(
        None, "Column with the completion of the prompt; default: completion.", metavar="COLUMN"
    )
    label_key: str | None = experiment(None, "Column with the label; default: label.", metavar="COLUMN")


class KtoConfig(Section):
    """Loss of labelled completions (KTO)."""

    beta: float = experiment(0.1, "Scale of log-ratios, against the KL to the reference.", gt=0)
    desirable_weight: float = experiment(1.0, "Weight of desirable completions.", ge=0)
    undesirable_weight: float = experiment(
        1.0, "Weight of undesirable completions; more of one kind are balanced by a weight below 1.", ge=0
    )

    @model_validator(mode="after")
    def _something_is_weighed(self) -> Self:
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError("--desirable-weight 0 and --undesirable-weight 0 train nothing; raise one of them")
        return self


class KtoRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = project("KTO")


class KtoJobConfig(WithReference):
    """The settings of training on labelled completions."""

    COMMAND: ClassVar[str] = "coati-rl kto"
    SUMMARY: ClassVar[str] = "Train on completions that are labelled desirable or undesirable (KTO)."
    JOB: ClassVar[str] = "kto"
    SAMPLES: ClassVar[str] = "coati_rl.reading.offline_samples:kto_samples"
    OBJECTIVE: ClassVar[str] = "consumer.objectives.kto:of_job"

    data: LabelledDataConfig = LabelledDataConfig()
    objective: KtoConfig = KtoConfig()
    run: KtoRunConfig = KtoRunConfig()

    @property
    def uses_reference(self) -> bool:
        """True: KTO always compares with a reference model."""
        return True

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        return "KTO of labelled completions"
