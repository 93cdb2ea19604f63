"""The configurations of the jobs on a dataset: what each adds to `OfflineConfig`, and its defaults."""

from typing import Any, ClassVar

from coati_rl.algorithms.choices import WITH_REFERENCE
from coati_rl.config.fields import execution, experiment
from coati_rl.config.objectives.cross_entropy import CrossEntropyConfig
from coati_rl.config.objectives.distillation import TeacherTextConfig
from coati_rl.config.objectives.kto import KtoConfig
from coati_rl.config.objectives.preference import PreferenceConfig
from coati_rl.config.objectives.process_reward import ProcessRewardConfig
from coati_rl.config.objectives.reference import ReferenceConfig
from coati_rl.config.objectives.reward_model import RewardModelConfig
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_data import LabelledDataConfig, PairDataConfig, SftDataConfig, StepsDataConfig
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.training import TrainingRunConfig
from coati_rl.types import OfflineJob

_RATE = OptimizerConfig.model_fields["learning_rate"].description or ""


def _project(name: str) -> Any:
    return execution(name, "Name of the run; the default run directory is runs/<project>.", short="-p")


def _learning_rate(value: float) -> Any:
    return experiment(value, _RATE, short="-lr", gt=0)


class SftOptimizerConfig(OptimizerConfig):
    """Learning rate, weight decay, clipping."""

    learning_rate: float = _learning_rate(2e-5)


class SftRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = _project("SFT")


class SftJobConfig(OfflineConfig):
    """The settings of supervised fine-tuning."""

    COMMAND: ClassVar[str] = "coati-rl sft"
    SUMMARY: ClassVar[str] = "Supervised fine-tuning on conversations or text."
    JOB: ClassVar[OfflineJob] = "sft"

    data: SftDataConfig = SftDataConfig()
    objective: CrossEntropyConfig = CrossEntropyConfig()
    distillation: TeacherTextConfig = TeacherTextConfig()
    optimizer: SftOptimizerConfig = SftOptimizerConfig()
    run: SftRunConfig = SftRunConfig()

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        tokens = {"assistant": "the assistant's tokens", "last": "the last turn's tokens", "all": "all tokens"}
        terms, share = "cross-entropy", self.distillation.distill_weight
        if self.distillation.teacher is not None:
            terms = f"{share:g} x forward KL to the teacher{f' + {1 - share:g} x cross-entropy' if share < 1 else ''}"
        return f"{terms} of {tokens[self.objective.loss_on]}"


class RewardOptimizerConfig(OptimizerConfig):
    """Learning rate, weight decay, clipping."""

    learning_rate: float = _learning_rate(1e-5)


class RmRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = _project("RM")


class RmJobConfig(OfflineConfig):
    """The settings of a reward model's training."""

    COMMAND: ClassVar[str] = "coati-rl rm"
    SUMMARY: ClassVar[str] = "Train a reward model on pairs of a chosen and a rejected completion (Bradley-Terry)."
    JOB: ClassVar[OfflineJob] = "rm"
    UNIT: ClassVar[int] = 2

    data: PairDataConfig = PairDataConfig()
    objective: RewardModelConfig = RewardModelConfig()
    optimizer: RewardOptimizerConfig = RewardOptimizerConfig()
    run: RmRunConfig = RmRunConfig()

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        weight = self.objective.center_rewards_coefficient
        return f"Bradley-Terry of pairs{f', rewards centred with weight {weight:g}' if weight else ''}"


class PrmRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = _project("PRM")


class PrmJobConfig(OfflineConfig):
    """The settings of a process reward model's training."""

    COMMAND: ClassVar[str] = "coati-rl prm"
    SUMMARY: ClassVar[str] = "Train a process reward model on solutions whose steps are labelled."
    JOB: ClassVar[OfflineJob] = "prm"

    data: StepsDataConfig = StepsDataConfig()
    objective: ProcessRewardConfig = ProcessRewardConfig()
    optimizer: RewardOptimizerConfig = RewardOptimizerConfig()
    run: PrmRunConfig = PrmRunConfig()

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        right, wrong = self.objective.reward_tokens
        return f"label {right} or {wrong} after each step"


class DpoRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = _project("DPO")


class _WithReference(OfflineConfig):
    """The settings of a job whose loss may compare with a reference model."""

    UNIT: ClassVar[int] = 2

    reference: ReferenceConfig = ReferenceConfig()

    @property
    def reference_model(self) -> str:
        """Return the model that the loss compares with."""
        return self.reference.reference_model or self.model.model

    @property
    def precomputes_reference(self) -> bool:
        """True if the reference's log-probabilities are computed before the first step and kept."""
        return self.uses_reference and self.reference.precompute_reference


class DpoJobConfig(_WithReference):
    """The settings of training on preferences."""

    COMMAND: ClassVar[str] = "coati-rl dpo"
    SUMMARY: ClassVar[str] = "Train on pairs of a chosen and a rejected completion: DPO, IPO, SimPO, ORPO and others."
    JOB: ClassVar[OfflineJob] = "dpo"

    data: PairDataConfig = PairDataConfig()
    objective: PreferenceConfig = PreferenceConfig()
    run: DpoRunConfig = DpoRunConfig()

    @property
    def uses_reference(self) -> bool:
        """True if the loss compares with a reference model."""
        return self.objective.loss in WITH_REFERENCE

    @property
    def objective_text(self) -> str:
        """Return the objective for people, as the plan shows it."""
        return f"{self.objective.loss} of pairs"


class KtoRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = _project("KTO")


class KtoJobConfig(_WithReference):
    """The settings of training on labelled completions."""

    COMMAND: ClassVar[str] = "coati-rl kto"
    SUMMARY: ClassVar[str] = "Train on completions that are labelled desirable or undesirable (KTO)."
    JOB: ClassVar[OfflineJob] = "kto"

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
