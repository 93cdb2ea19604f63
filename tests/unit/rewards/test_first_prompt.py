"""Test what a dry run shows of the first prompt, and what its reward gives for the right answer."""

import json

import pytest

from coati_rl.config import Config
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Prompt
from rewards.first_prompt import answers_for, first_prompt_lines, is_tried, shown

PROMPT = Prompt(uid="a", token_ids=(1,), ground_truth="8", text="What?", rendered="<user>\nWhat?")


def lines(reward_type: str, *prompts: Prompt) -> list[str]:
    return list(first_prompt_lines(Config(model="model", reward_type=reward_type), prompts))


@pytest.mark.full
@pytest.mark.parametrize(
    ("reward_type", "expected"),
    [
        ("boxed", "its reward              1 for \\boxed{8}, 0 for an empty response"),
        (
            "think_answer_tags",
            "its reward              1 for <think></think><answer>8</answer>, 0 for an empty response",
        ),
    ],
)
def test_the_prompt_is_shown_with_what_its_answer_gets(reward_type, expected) -> None:
    assert lines(reward_type, PROMPT) == ['first prompt            "<user>\\nWhat?"', expected]


def test_a_function_that_fails_is_seen_before_anything_starts(tmp_path) -> None:
    path = tmp_path / "own.py"
    path.write_text("def score(response, ground_truth):\n    return 0.5 if response else {}['none']\n")
    _, reward = lines(f"{path}:score", PROMPT)
    assert reward.startswith("its reward              0.5 for 8, 0.5 for \\boxed{8}, invalid (")
    assert "KeyError" in reward


def test_without_prompts_nothing_is_said_and_other_rewards_are_not_tried() -> None:
    assert lines("boxed") == []
    assert lines("code", PROMPT) == ['first prompt            "<user>\\nWhat?"']


@pytest.mark.parametrize(
    ("reward_type", "is_cheap", "answers"),
    [
        ("boxed", True, ("\\boxed{8}",)),
        ("boxed=1,own.py:score=0.5", True, ("\\boxed{8}",)),
        ("boxed=1,think_answer_tags=1", True, ("<think></think><answer>\\boxed{8}</answer>",)),
        ("own.py:score", True, ("8", "\\boxed{8}")),
        ("boxed=1,code=1", False, ("\\boxed{8}",)),
        ("http://127.0.0.1:1/score", False, ("8", "\\boxed{8}")),
        ("boxed=1,model:judge=1", False, ("\\boxed{8}",)),
        ("none", False, ("8", "\\boxed{8}")),
        ("env", False, ("8", "\\boxed{8}")),
    ],
)
def test_rewards_that_only_compare_are_tried_with_the_answer_in_their_form(reward_type, is_cheap, answers) -> None:
    spec = RewardSpec(reward_type=reward_type)
    assert (is_tried(spec), answers_for(spec, "8"), answers_for(spec, "")) == (is_cheap, answers, ())


def test_of_a_long_prompt_the_middle_is_left_out() -> None:
    assert json.loads(shown("a" * 400)) == "a" * 400
    assert shown("a" * 300 + "b" * 300) == f'"{"a" * 200} ... {"b" * 200}" (200 characters left out)'
