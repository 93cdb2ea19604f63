"""Test the `think_answer_tags` reward."""

import pytest

from coati_rl.types import Score
from rewards.math.answer_format import THINK_ANSWER_TAGS
from rewards.math.think_answer_tags import think_answer_tags_reward


def test_a_right_answer_in_a_valid_format_earns_one() -> None:
    response = "<think> 3 x 24 </think><answer> 72 </answer>"
    assert think_answer_tags_reward(response, "72") == Score(
        reward=1.0, answer_correct=True, format_valid=True, verdict="ok", detail="72 equals 72"
    )


def test_a_valid_format_alone_earns_nothing() -> None:
    score = think_answer_tags_reward("<think>3 x 24</think><answer>73</answer>", "72")
    assert (score.reward, score.answer_correct, score.format_valid, score.verdict) == (0.0, False, True, "wrong")


def test_a_right_answer_in_a_broken_format_earns_nothing_but_is_reported() -> None:
    score = think_answer_tags_reward("<answer>72</answer>", "72")
    assert (score.reward, score.answer_correct, score.format_valid, score.verdict) == (0.0, False, False, "wrong")
    assert score.detail == "72 equals 72, but not one <think></think> and then one <answer></answer>"


def test_a_response_without_an_answer_is_wrong() -> None:
    score = think_answer_tags_reward(r"<think>so \boxed{72}</think>", "72")
    assert (score.reward, score.answer_correct, score.format_valid, score.verdict) == (0.0, False, False, "wrong")


def test_a_broken_ground_truth_is_invalid_whatever_the_format() -> None:
    assert think_answer_tags_reward("<think>a</think><answer>72</answer>", "").verdict == "invalid"
    assert think_answer_tags_reward("72", "").verdict == "invalid"


@pytest.mark.parametrize(
    "response",
    [
        "<think>a</think><answer>1</answer>",
        "<think></think><answer></answer>",
        "First. <think>a\nb</think>\n\nSo: <answer>1</answer> Done.",
    ],
)
def test_one_think_block_and_then_one_answer_block_is_valid(response: str) -> None:
    assert THINK_ANSWER_TAGS.is_valid(response)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "<answer>1</answer>",
        "<think>a</think>",
        "a</think><answer>1</answer>",
        "<think>a<answer>1</answer>",
        "<think>a</think><answer>1",
        "<answer>1</answer><think>a</think>",
        "<think>a<answer>1</answer></think>",
        "</think>a<think><answer>1</answer>",
        "<think>a</think><think>b</think><answer>1</answer>",
        "<think>a</think><answer>1</answer><answer>1</answer>",
        "<THINK>a</THINK><ANSWER>1</ANSWER>",
    ],
)
def test_a_missing_repeated_or_misplaced_tag_is_not_valid(response: str) -> None:
    assert not THINK_ANSWER_TAGS.is_valid(response)
