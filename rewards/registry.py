"""The rewards by name: a `--reward-type` flows in, the function and the default system prompt flow out."""

from typing import Protocol

from coati_rl.errors import ConfigError
from coati_rl.types import Score
from rewards.boxed import boxed_reward
from rewards.think_answer_tags import think_answer_tags_reward


class RewardFn(Protocol):
    """Scores one response of a policy.

    Pure and deterministic, so that a sample can be scored again after a worker died. It never raises for what a model
    may write: what it cannot decide has the verdict "invalid".
    """

    def __call__(self, response: str, ground_truth: str) -> Score:
        """Score `response`; `ground_truth` is the row's text: an answer (or, for rewards that run code, JSON tests)."""


_REWARDS: dict[str, RewardFn] = {"boxed": boxed_reward, "think_answer_tags": think_answer_tags_reward}

# Word for word the reference's, "and<answer>" included: models trained there were prompted with this text.
SYSTEM_PROMPTS: dict[str, str] = {
    "boxed": "Please reason step by step, and put your final answer within \\boxed{}.",
    "think_answer_tags": (
        "You are a helpful assistant. The assistant first thinks about the reasoning process in the mind and then "
        "provides the user with the answer. The reasoning process and answer are enclosed within <think> </think> "
        "and<answer> </answer> tags, respectively, i.e., <think> reasoning process here </think><answer> answer here "
        "</answer>. Now the user asks you to solve a math problem that involves reasoning. After thinking, when you "
        "finally reach a conclusion, clearly output the final answer without explanation within the <answer> </answer> "
        "tags, i.e., <answer> 123 </answer>.\n\n"
    ),
}


def get_reward(name: str) -> RewardFn:
    """The reward function of a reward type.

    Raises: ConfigError for a name that is unknown or not available yet; the message lists the choices.
    """
    _require_available(name)
    return _REWARDS[name]


def default_system_prompt(name: str) -> str:
    """The system prompt that asks for the answer format of a reward type, used when the user gives none.

    Raises: ConfigError as `get_reward`.
    """
    _require_available(name)
    return SYSTEM_PROMPTS[name]


def _require_available(name: str) -> None:
    if name in _REWARDS:
        return
    choices = ", ".join(_REWARDS)
    if name == "code" or ".py:" in name:
        raise ConfigError(f"reward type {name!r} is not available yet; choose one of: {choices}")
    raise ConfigError(f"unknown reward type {name!r}; choose one of: {choices}")
