"""Rewards by name, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from rewards import SYSTEM_PROMPTS, default_system_prompt, get_reward

REPOSITORY = Path(__file__).parents[3]


def test_each_reward_type_has_a_function_and_a_system_prompt() -> None:
    assert get_reward("boxed")(r"\boxed{5}", "5").reward == 1.0
    assert get_reward("think_answer_tags")("<think></think><answer>5</answer>", "5").reward == 1.0
    assert set(SYSTEM_PROMPTS) == {"boxed", "think_answer_tags"}


def test_the_default_system_prompts_are_the_references() -> None:
    assert default_system_prompt("boxed") == (r"Please reason step by step, and put your final answer within \boxed{}.")
    tags = default_system_prompt("think_answer_tags")
    assert tags.startswith("You are a helpful assistant. The assistant first thinks about the reasoning process in")
    assert "enclosed within <think> </think> and<answer> </answer> tags, respectively" in tags
    assert tags.endswith("i.e., <answer> 123 </answer>.\n\n")


@pytest.mark.parametrize("refuse", [get_reward, default_system_prompt])
def test_an_unknown_reward_type_is_refused_with_the_choices(refuse: object) -> None:
    assert callable(refuse)
    with pytest.raises(ConfigError, match="unknown reward type 'box'; choose one of: boxed, think_answer_tags"):
        refuse("box")


@pytest.mark.parametrize("name", ["code", "my_rewards.py:score"])
def test_a_reward_type_that_is_not_available_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"reward type '{name}' is not available yet"):
        get_reward(name)


def test_importing_rewards_loads_no_engine_and_no_sympy() -> None:
    code = (
        "import sys, rewards; heavy = {'torch', 'vllm', 'ray', 'transformers', 'sympy', 'math_verify'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "assert rewards.get_reward('boxed')('\\\\boxed{5}', '5').reward == 1.0;"
        "assert 'math_verify' in sys.modules and not {'torch', 'vllm', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
