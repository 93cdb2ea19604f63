"""Set how the steps of a solution are marked and labelled for a process reward model."""

from typing import Literal, Self

from pydantic import field_validator, model_validator

from coati_rl.config.fields import Section, experiment

LabelSoftmax = Literal["reward-tokens", "vocabulary"]


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
