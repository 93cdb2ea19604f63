"""Define the training of a process reward model on labelled steps."""

from typing import Any, ClassVar, Literal, Self

from pydantic import field_validator, model_validator

from coati_rl.config.fields import Section, experiment
from coati_rl.config.jobs.common import RewardOptimizerConfig, project
from coati_rl.config.offline import OfflineConfig
from coati_rl.config.offline_data import OfflineDataConfig
from coati_rl.config.training import TrainingRunConfig

LabelSoftmax = Literal["reward-tokens", "vocabulary"]


class StepsDataConfig(OfflineDataConfig):
    """Training and evaluation rows: the steps of solutions with a label each."""

    output_key: str | None = experiment(
        None, "Column with a list of steps, where the prompt stands in another one; default: completions.",
        metavar="COLUMN",
    )  # fmt: skip
    label_key: str | None = experiment(
        None, "Column with the list of labels; default: labels, or label beside one text of all steps.",
        metavar="COLUMN",
    )  # fmt: skip


class ProcessRewardConfig(Section):
    """Tokens after each step and of its label."""

    placeholder_token: str = experiment(
        "ки", "Token after each step, at which its label is predicted; a single token of the model's vocabulary."
    )
    reward_tokens: list[str] = experiment(
        ["+", "-"], "Tokens for a right and for a wrong step, in this order; repeat the flag: --reward-tokens=-."
    )
    label_softmax: LabelSoftmax = experiment(
        "reward-tokens",
        "Over what a label's probability is normalised; vocabulary: as OpenRLHF without --reward_tokens.",
    )

    @field_validator("reward_tokens")
    @classmethod
    def _one_for_right_and_one_for_wrong(cls, tokens: list[str]) -> list[str]:
        if len(tokens) != 2 or tokens[0] == tokens[1]:
            raise ValueError("name two tokens, for a right and for a wrong step: --reward-tokens + --reward-tokens=-")
        return tokens

    @model_validator(mode="after")
    def _placeholder_is_no_label(self) -> Self:
        if self.placeholder_token in self.reward_tokens:
            raise ValueError(f"--placeholder-token {self.placeholder_token!r} is a label too; choose another token")
        return self


class PrmRunConfig(TrainingRunConfig):
    """Seed, outputs, intervals."""

    project: str = project("PRM")


class PrmJobConfig(OfflineConfig):
    """The settings of a process reward model's training."""

    COMMAND: ClassVar[str] = "coati-rl prm"
    SUMMARY: ClassVar[str] = "Train a process reward model on solutions whose steps are labelled."
    JOB: ClassVar[str] = "prm"
    SAMPLES: ClassVar[str] = "coati_rl.reading.reward_samples:prm_samples"
    OBJECTIVE: ClassVar[str] = "consumer.objectives.process_reward:of_job"

    data: StepsDataConfig = StepsDataConfig()
    objective: ProcessRewardConfig = ProcessRewardConfig()
    optimizer: RewardOptimizerConfig = RewardOptimizerConfig()
    run: PrmRunConfig = PrmRunConfig()

    @property
    def objective_text(self) -> str:
        right, wrong = self.objective.reward_tokens
        return f"label {right} or {wrong} after each step"

    @property
    def sample_options(self) -> dict[str, Any]:
        """Return the arguments of `SAMPLES`."""
        return {"placeholder": self.objective.placeholder_token, "reward_tokens": self.objective.reward_tokens}
