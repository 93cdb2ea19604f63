"""Test the `boxed` reward."""

import pytest

from coati_rl.types import Score
from rewards.math.boxed import boxed_reward


def test_a_right_answer_in_a_box_earns_one() -> None:
    assert boxed_reward(r"3 x 24 is \boxed{72}", "72") == Score(
        reward=1.0, answer_correct=True, format_valid=True, verdict="ok", detail="72 equals 72"
    )


def test_a_wrong_answer_in_a_box_earns_nothing() -> None:
    assert boxed_reward(r"\boxed{73}", "72") == Score(
        reward=0.0, answer_correct=False, format_valid=True, verdict="wrong", detail="73 is not 72"
    )


@pytest.mark.parametrize("response", ["", "72", r"\boxed{72", r"\fbox{72}", "<answer>72</answer>"])
def test_an_answer_outside_of_a_closed_box_does_not_count(response: str) -> None:
    assert boxed_reward(response, "72") == Score(
        reward=0.0, answer_correct=False, format_valid=False, verdict="wrong", detail="no answer found"
    )


def test_the_last_box_counts() -> None:
    assert boxed_reward(r"\boxed{72} no, \boxed{73}", "72").verdict == "wrong"
    assert boxed_reward(r"\boxed{73} no, \boxed{72}", "72").verdict == "ok"


@pytest.mark.parametrize("response", [r"\boxed{72}", "72"])
def test_a_broken_ground_truth_makes_every_response_invalid(response: str) -> None:
    assert boxed_reward(response, r"\frac{").verdict == "invalid"
