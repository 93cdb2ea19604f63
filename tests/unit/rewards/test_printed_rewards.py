"""Score with reward classes and transformers as RL4LLM prints them, unedited, under -rt and --reward-combine."""

from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards.registry import make_reward
from rewards.weighted import Combination, load_combine

FILES = Path(__file__).parents[2] / "data" / "other_systems"
TWO = FILES / "rl4llm_files" / "two_rewards.py"
TOOLS = FILES / "rl4llm_files" / "tools.py"
PROBLEM = Problem(ground_truth="4", messages=({"role": "user", "content": "2 + 2?"},), prompt="2 + 2?")


def score(reward_type, response="4", combine=None):
    reward = make_reward(RewardSpec(reward_type=reward_type, combine=combine))
    (found,) = reward.score([response], PROBLEM)
    return found


def test_a_reward_class_runs_with_its_import_and_its_base_class():
    found = score(f"{TWO}:AccuracyReward")
    assert (found.reward, found.verdict) == (1.0, "ok")
    assert score(f"{TWO}:LengthReward", "a long answer").reward == 0.0


def test_the_transformer_gets_tensors_by_the_names_that_the_rewards_give_themselves():
    both = f"{TWO}:AccuracyReward,{TWO}:LengthReward"
    found = score(both, combine=f"{TWO}:my_reward_transformer")
    assert found.reward == pytest.approx(0.85)
    assert found.breakdown == {"two_rewards.AccuracyReward": 1.0, "two_rewards.LengthReward": 0.5}
    in_place = score(f"{TOOLS}:Accuracy,{TOOLS}:ToolUsage", combine=f"{TOOLS}:reward_transform_fn")
    assert (in_place.reward, in_place.breakdown) == (1.0, {"tools.Accuracy": 1.0, "tools.ToolUsage": 0.0})


def test_a_function_of_other_parameters_gets_numbers_by_the_names_of_the_breakdown(tmp_path):
    path = tmp_path / "combine.py"
    path.write_text("def f(rewards): return sum(rewards.values())")
    assert score(f"{TWO}:AccuracyReward,{TWO}:LengthReward", combine=f"{path}:f").reward == 1.5


def test_names_that_the_transformer_does_not_know_are_refused_with_those_that_there_are():
    with pytest.raises(ConfigError, match="KeyError: 'length_reward'; it is called with a dictionary of the rewards "):
        make_reward(RewardSpec(reward_type=f"{TWO}:AccuracyReward,boxed", combine=f"{TWO}:my_reward_transformer"))
    with pytest.raises(ConfigError, match="two rewards have the name 'same'"):
        load_combine(f"{TWO}:my_reward_transformer", ["a", "b"], own_names=lambda: {"a": "same", "b": "same"})


def test_scores_that_come_from_other_places_are_combined_by_the_same_names():
    """A reward model scores in a process of its own, and the others by theirs."""
    names = {"mine.A": "accuracy_reward", "rm": "length_reward"}
    function = load_combine(f"{TWO}:my_reward_transformer", [*names], own_names=lambda: names)
    combined = Combination(dict.fromkeys(names, 1.0), function)([score("boxed", "\\boxed{4}"), score("boxed", "5")])
    assert combined.reward == pytest.approx(0.7)


def test_a_reward_of_more_of_a_system_than_is_there_says_which_edit_it_needs():
    with pytest.raises(ConfigError, match=r"No module named 'openrlhf.utils.math_utils'; OpenRLHF is not installed"):
        make_reward(RewardSpec(reward_type=f"{FILES / 'openrlhf_agents' / 'imports_more.py'}:reward_func"))
