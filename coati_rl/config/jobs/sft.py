"""Define supervised fine-tuning, with or without a teacher."""

from typing import Any, ClassVar, Literal

from coati_rl.config.data import streaming_field
from coati_rl.config.fields import Needs, Section, experiment
from coati_rl.config.jobs.common import learning_rate, project
from coati_rl.config.model import aux_loss_coeff
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_data import OfflineDataConfig
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.training import TrainingRunConfig
from coati_rl.config.user_paths import OptionalPath

LossOn = Literal["assistant", "last", "all"]


class SftDataConfig(OfflineDataConfig):
    """Training and evaluation rows: conversations, prompts with completions, or text."""

    streaming: bool = streaming_field()
    output_key: str | None = experiment(
        None, "Column with the completion of the prompt; default: completion.", metavar="COLUMN"
    )


class CrossEntropyConfig(Section):
    """Loss of supervised fine-tuning: cross-entropy, averaged over the tokens of a step."""

    loss_on: LossOn = experiment(
        "assistant",
        "Tokens that are trained: all turns of the assistant, the last one alone, or all tokens of the row. Of plain "
        "text all are, or those of the completion.",
    )
    aux_loss_coeff: float = aux_loss_coeff()


class TeacherTextConfig(Section):
    """Distillation on a dataset's text, such as a teacher wrote."""

    NEEDS: ClassVar[Needs] = {"teacher": ()}

    teacher: OptionalPath = experiment(
        None,
        "Frozen model whose distribution the text's tokens are trained on: directory or hub id, with the model's "
        "vocabulary; None: off.",
        metavar="MODEL",
    )
    distill_weight: float = experiment(
        1.0, "Share of the forward KL to the teacher in the loss; the rest is cross-entropy.", gt=0, le=1
    )


class SftOptimizerConfig(OptimizerConfig):
    """Learning rate, weight decay, clipping."""

    learning_rate: float = learning_rate(2e-5)


class SftRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = project("SFT")


class SftJobConfig(OfflineConfig):
    """The settings of supervised fine-tuning."""

    COMMAND: ClassVar[str] = "coati-rl sft"
    SUMMARY: ClassVar[str] = "Supervised fine-tuning on conversations or text."
    JOB: ClassVar[str] = "sft"
    SAMPLES: ClassVar[str] = "coati_rl.reading.offline_samples:sft_samples"
    OBJECTIVE: ClassVar[str] = "consumer.objectives.forward_kl:of_job"

    data: SftDataConfig = SftDataConfig()
    objective: CrossEntropyConfig = CrossEntropyConfig()
    distillation: TeacherTextConfig = TeacherTextConfig()
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    run: SftRunConfig = SftRunConfig()

    @property
    def objective_text(self) -> str:
        tokens = {"assistant": "the assistant's tokens", "last": "the last turn's tokens", "all": "all tokens"}
        terms, share = "cross-entropy", self.distillation.distill_weight
        if self.distillation.teacher is not None:
            terms = f"{share:g} x forward KL to the teacher{f' + {1 - share:g} x cross-entropy' if share < 1 else ''}"
        return f"{terms} of {tokens[self.objective.loss_on]}"

    @property
    def sample_options(self) -> dict[str, Any]:
        """Return the arguments of `SAMPLES`."""
        return {"loss_on": self.objective.loss_on}
