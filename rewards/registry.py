"""Make the rewards that `--reward-type` names, and return their default system prompts."""

import functools
import operator
import os
from functools import partial
from typing import Protocol

from coati_rl.errors import ConfigError
from coati_rl.generator_spec import GENERATED
from coati_rl.reward_spec import (
    BUILT_IN_REWARDS,
    ENVIRONMENT_REWARD,
    NO_COLUMNS,
    NO_REWARD,
    RewardColumns,
    RewardSpec,
    is_model,
    is_own,
    is_url,
    parse_reward_type,
    short_names,
)
from coati_rl.reward_url import secrets_of
from coati_rl.types import Problem, Score
from rewards.math.boxed import boxed_reward
from rewards.math.think_answer_tags import think_answer_tags_reward
from rewards.own_function import OwnFunctionReward
from rewards.reward import ResponseReward, Reward, RewardFn
from rewards.weighted import WeightedPart, WeightedReward, load_combine


class _MathRewardFn(Protocol):
    def __call__(self, response: str, ground_truth: str, *, must_be_number: bool = True) -> Score: ...


_FUNCTIONS: dict[str, _MathRewardFn] = {"boxed": boxed_reward, "think_answer_tags": think_answer_tags_reward}
GENERATED_COLUMNS = RewardColumns(required=("metadata",), are_kept=True)
_SHARE_OF_A_SERVER = 0.9  # of the time of a response: who still waits when it is over is killed, process and all

# Word for word ColossalChat's, "and<answer>" included: models trained there were prompted with this text.
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
    "code": "You are a helpful assistant.",
    # Word for word the package's default, which its verifiers' examples refer to.
    GENERATED: (
        "Given a problem, your task is to answer the question by thinking step-by-step in a clear and specific manner."
        "\nOnce you have thought about the reasoning process, provide the answer in the following format:\n"
        "<answer>answer here</answer>\n"
        "Do not explain your reasoning inside the answer tags, provide only the final answer. When an example is "
        "provided, you should strictly follow the format of the output/answer in that example.\n"
    ),
}


def get_reward(name: str) -> RewardFn:
    """Return the function that scores one response with a reward type, in this process and thread.

    Raises: ConfigError as `make_reward`.
    """
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    reward = make_reward(RewardSpec(reward_type=name, secrets=secrets_of(name, os.environ)))

    def score_one(response: str, ground_truth: str) -> Score:
        return next(iter(reward.score([response], Problem(ground_truth=ground_truth))))

    return score_one


def make_reward(spec: RewardSpec) -> Reward:
    """Make the reward of a scoring process.

    Raises: ConfigError for a reward that cannot be made; the message contains the remedy.
    """
    parts = parse_reward_type(spec.reward_type)
    names = short_names(parts)
    combine = load_combine(spec.combine, names, own_names=lambda: own_names(spec.reward_type))
    if len(parts) == 1 and parts[0].weight == 1 and combine is None:
        return _make_one(parts[0].name, spec)
    return WeightedReward(
        [
            WeightedPart(name=short, weight=part.weight, reward=_make_one(part.name, spec))
            for part, short in zip(parts, names, strict=True)
        ],
        combine,
    )


def default_system_prompt(reward_type: str) -> str:
    """Return the system prompt that asks for the answer format of a reward type; used if the user gives none.

    It is that of the first built-in reward; empty without a built-in reward, since other rewards define no format.

    Raises: ConfigError for an invalid reward type.
    """
    names = [part.name for part in parse_reward_type(reward_type)]
    return next((SYSTEM_PROMPTS[name] for name in names if name in BUILT_IN_REWARDS), "")


def needs_ground_truth(reward_type: str) -> bool:
    """Return True if a user's function cannot be called without a row's ground truth.

    Raises: ConfigError for an invalid reward type or function.
    """
    names = [part.name for part in parse_reward_type(reward_type)]
    return any(OwnFunctionReward(name).needs_truth for name in names if is_own(name))


def columns_of(reward_type: str) -> RewardColumns:
    """Return the columns of a row that user functions read besides messages and ground truth.

    Raises: ConfigError for an invalid reward type or function.
    """
    names = [part.name for part in parse_reward_type(reward_type)]
    of_own = functools.reduce(
        operator.or_, (OwnFunctionReward(name).columns for name in names if is_own(name)), NO_COLUMNS
    )
    return of_own | GENERATED_COLUMNS if GENERATED in names else of_own


def own_names(reward_type: str) -> dict[str, str]:
    """Return the names that classes of rewards give themselves, by the short names that they have here.

    Raises: ConfigError for an invalid reward type or function.
    """
    parts = parse_reward_type(reward_type)
    found = {
        short: OwnFunctionReward(part.name).own_name
        for part, short in zip(parts, short_names(parts), strict=True)
        if is_own(part.name)
    }
    return {short: own for short, own in found.items() if own is not None}


def _make_one(name: str, spec: RewardSpec) -> Reward:
    if is_url(name):
        from rewards.http_model.http_reward import HttpReward  # a client's imports are paid by who uses it

        return HttpReward(
            name,
            secrets=spec.secrets,
            timeout_s=_SHARE_OF_A_SERVER * (spec.group_timeout_s or spec.timeout_s),
            correct_from=spec.correct_from,
        )
    if is_model(name):  # it computes in one process for all, on a device of its own
        raise ConfigError(f"{name}: a reward model does not score in such a process; use rewards.scoring.open_scorer")
    if is_own(name):
        return OwnFunctionReward(name, correct_from=spec.correct_from)
    if name == ENVIRONMENT_REWARD:
        raise ConfigError(f"{name}: an environment gives its rewards while it runs (--env); score with another reward")
    if name == "code":
        from rewards.code.code_reward import CodeReward  # as above

        return CodeReward(spec)
    if name == GENERATED:
        from rewards.generated_reward import GeneratedReward  # as above

        return GeneratedReward(correct_from=spec.correct_from)
    if name == NO_REWARD:
        return ResponseReward(_no_reward)
    return ResponseReward(partial(_FUNCTIONS[name], must_be_number=spec.math_answer == "number"))


def _no_reward(response: str, ground_truth: str) -> Score:
    """Return reward 0 for any response."""
    return Score(reward=0.0, answer_correct=False, format_valid=True, verdict="wrong", detail="not scored")
