"""Test rewards by name, and which names are refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.ground_truth import required_truth
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import SYSTEM_PROMPTS, default_system_prompt, get_reward, make_reward
from rewards.http_model.http_reward import HttpReward
from rewards.own_function import OwnFunctionReward
from rewards.registry import needs_ground_truth
from rewards.reward import ResponseReward, only_computes
from rewards.weighted import WeightedReward

REPOSITORY = Path(__file__).parents[3]
RIGHT = "<think></think><answer>5</answer>"


@pytest.fixture
def brevity(tmp_path: Path) -> str:
    """A reward of one's own: the shorter the better."""
    (tmp_path / "brevity.py").write_text("def score(response, ground_truth): return -len(response)\n", encoding="utf-8")
    return f"{tmp_path}/brevity.py:score"


def test_each_built_in_reward_has_a_function_and_a_system_prompt() -> None:
    assert get_reward("boxed")(r"\boxed{5}", "5").reward == 1.0
    assert get_reward("think_answer_tags")(RIGHT, "5").reward == 1.0
    assert set(SYSTEM_PROMPTS) == {"boxed", "think_answer_tags", "code", "reasoning_gym"}


def test_no_reward_is_zero_for_every_response_and_asks_for_nothing() -> None:
    (score,) = make_reward(RewardSpec(reward_type="none")).score([RIGHT], Problem(ground_truth=""))
    assert (score.reward, score.answer_correct, score.verdict) == (0.0, False, "wrong")
    assert default_system_prompt("none") == "" and not needs_ground_truth("none")
    assert required_truth("none") is None
    with pytest.raises(ConfigError, match="none adds nothing to other rewards; leave it out"):
        default_system_prompt("boxed=1,none=1")


def test_the_default_system_prompts_are_the_references() -> None:
    assert default_system_prompt("boxed") == (r"Please reason step by step, and put your final answer within \boxed{}.")
    assert default_system_prompt("code") == "You are a helpful assistant."
    tags = default_system_prompt("think_answer_tags")
    assert tags.startswith("You are a helpful assistant. The assistant first thinks about the reasoning process in")
    assert "enclosed within <think> </think> and<answer> </answer> tags, respectively" in tags
    assert tags.endswith("i.e., <answer> 123 </answer>.\n\n")


def test_the_first_built_in_reward_of_a_sum_has_the_system_prompt_and_without_one_there_is_none() -> None:
    assert default_system_prompt("mine.py:f=1,boxed=2,think_answer_tags=1") == SYSTEM_PROMPTS["boxed"]
    assert default_system_prompt("mine.py:f") == default_system_prompt("http://rm/score") == ""


def test_a_function_that_takes_a_ground_truth_needs_one_and_nothing_else_does(brevity: str, tmp_path: Path) -> None:
    (tmp_path / "short.py").write_text("def score(response): return -len(response)\n", encoding="utf-8")
    without = f"{tmp_path}/short.py:score"
    names = (brevity, without, f"{without}=1,{brevity}=1", "boxed", "http://rm/score")
    needing = [name for name in names if needs_ground_truth(name)]
    assert needing == [brevity, f"{without}=1,{brevity}=1"]


@pytest.mark.parametrize("refuse", [get_reward, default_system_prompt])
def test_an_unknown_reward_type_is_refused_with_the_choices(refuse: object) -> None:
    assert callable(refuse)
    with pytest.raises(
        ConfigError, match=r"unknown reward 'box'; use think_answer_tags, boxed, code, reasoning_gym, FILE\.py:FUNC"
    ):
        refuse("box")


def test_a_name_makes_the_reward_it_names(brevity: str) -> None:
    made = {name: make_reward(RewardSpec(reward_type=name)) for name in ("boxed", brevity, "http://rm:8000/score")}
    assert [type(reward) for reward in made.values()] == [ResponseReward, OwnFunctionReward, HttpReward]


def test_the_code_reward_has_the_limits_of_its_spec() -> None:
    from rewards.code.code_reward import CodeReward

    reward = make_reward(RewardSpec(reward_type="code", test_timeout_s=3.0, test_memory_mb=64))
    assert isinstance(reward, CodeReward)
    assert (reward._limits.cpu_s, reward._limits.memory_bytes) == (3.0, 64 * 2**20)


def test_one_reward_of_weight_1_is_itself_and_another_weight_or_several_make_a_sum(brevity: str) -> None:
    (score,) = make_reward(RewardSpec(reward_type="boxed=1")).score([r"\boxed{5}"], Problem(ground_truth="5"))
    assert (score.reward, score.breakdown) == (1.0, {})
    doubled = make_reward(RewardSpec(reward_type="boxed=2"))
    assert isinstance(doubled, WeightedReward)
    (score,) = doubled.score([r"\boxed{5}"], Problem(ground_truth="5"))
    assert (score.reward, score.breakdown) == (2.0, {"boxed": 1.0})
    both = make_reward(RewardSpec(reward_type=f"boxed=1,{brevity}=0.125"))
    (score,) = both.score([r"\boxed{5}"], Problem(ground_truth="5"))
    assert (score.reward, score.answer_correct) == (1 - 9 * 0.125, True)
    assert score.breakdown == {"boxed": 1.0, "brevity.score": -9.0}


def test_cpu_time_and_memory_are_limited_where_all_parts_only_compute(brevity: str) -> None:
    limited = {name: only_computes(make_reward(RewardSpec(reward_type=name))) for name in ("boxed", "boxed=2", brevity)}
    assert limited == {"boxed": True, "boxed=2": True, brevity: False}
    assert not only_computes(make_reward(RewardSpec(reward_type=f"boxed=1,{brevity}=1")))


def test_every_reward_type_is_a_function_too(brevity: str) -> None:
    assert get_reward(brevity)("four", "").reward == -4.0
    assert get_reward(f"boxed=1,{brevity}=1")(r"\boxed{5}", "5").reward == -8.0


def test_what_a_function_of_ones_own_lacks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"--reward-type .*nothing.py:score: there is no file .*nothing.py; write FILE.py:"
    ):
        get_reward(f"{tmp_path}/nothing.py:score")


@pytest.mark.full
def test_importing_rewards_loads_no_engine_no_sympy_and_no_client() -> None:
    code = (
        "import sys, rewards;"
        "heavy = {'torch', 'vllm', 'ray', 'transformers', 'sympy', 'math_verify', 'httpx2'};"
        "heavy.add('rewards.code.code_reward');"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "assert rewards.get_reward('boxed')('\\\\boxed{\\\\sin(x)}', '\\\\sin x').reward == 1.0;"
        "assert 'math_verify' in sys.modules and not {'torch', 'vllm', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
