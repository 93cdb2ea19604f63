"""Test the settings of reward model objectives: defaults, and refusals that say what to write."""

import pytest
from pydantic import ValidationError

from coati_rl.config.jobs.prm import ProcessRewardConfig
from coati_rl.config.jobs.rm import RewardModelConfig


def test_a_reward_model_has_no_centre_penalty_unless_asked_for() -> None:
    assert RewardModelConfig().center_rewards_coefficient == 0.0
    with pytest.raises(ValidationError, match="center_rewards_coefficient"):
        RewardModelConfig(center_rewards_coefficient=-0.1)


@pytest.mark.parametrize("tokens", [["+"], ["+", "-", "0"], ["+", "+"]])
def test_reward_tokens_are_two_different_ones(tokens: list[str]) -> None:
    with pytest.raises(ValidationError, match="name two tokens, for a right and for a wrong step: --reward-tokens"):
        ProcessRewardConfig(reward_tokens=tokens)


def test_the_placeholder_is_not_a_label() -> None:
    assert ProcessRewardConfig(placeholder_token="<step>").reward_tokens == ["+", "-"]
    with pytest.raises(ValidationError, match=r"--placeholder-token '\+' is a label too"):
        ProcessRewardConfig(placeholder_token="+")
