"""Test the conversion of a user function's return values, valid and invalid ones."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from coati_rl.types import Score
from rewards.returned_value import as_score, as_scores


def told(score: Score) -> tuple[float, bool, bool, str]:
    return score.reward, score.answer_correct, score.format_valid, score.verdict


@pytest.mark.parametrize(
    ("value", "reward"),
    [
        (1, 1.0),
        (1.5, 1.5),
        (0, 0.0),
        (-2.5, -2.5),
        (True, 1.0),
        (False, 0.0),
        (np.float32(1.0), 1.0),
        (np.int64(2), 2.0),
        (np.bool_(False), 0.0),
        (np.array(0.5), 0.5),
        (torch.tensor(1.0), 1.0),
        (torch.tensor([0.5]), 0.5),
        (torch.tensor(0.25, dtype=torch.bfloat16, requires_grad=True), 0.25),
    ],
)
def test_a_number_is_a_reward_and_full_marks_are_right(value: Any, reward: float) -> None:
    assert told(as_score(value)) == (reward, reward >= 1, True, "ok" if reward >= 1 else "wrong")
    assert type(as_score(value).reward) is float, "it travels as JSON"


@pytest.mark.parametrize(
    ("value", "is_correct"),
    [
        (0.5, True),
        (0.4, False),
        ({"reward": 0.5}, True),
        ({"reward": 0.5, "answer_correct": 0.5}, False),  # it says so itself, and 1 is yes
        ({"reward": 0.0, "answer_correct": True}, True),
    ],
)
def test_a_task_says_from_which_reward_on_an_answer_is_right_where_the_function_does_not(
    value: Any, is_correct: bool
) -> None:
    score = as_score(value, correct_from=0.5)
    assert (score.answer_correct, score.verdict) == (is_correct, "ok" if is_correct else "wrong")


def test_scores_of_a_group_say_what_is_right_whatever_the_task_says() -> None:
    plain, marked = as_scores([0.5, 0.4], 2, correct_from=0.5), as_scores({"rewards": [9.0], "scores": [0.9]}, 1)
    assert [score.answer_correct for score in (*plain, *marked)] == [True, False, False]


@pytest.mark.parametrize(
    ("value", "came"),
    [
        (None, "None"),
        (math.nan, "nan (float)"),
        (-math.inf, "-inf (float)"),
        (10**400, "(int)"),
        ("1.0", "'1.0' (str)"),
        ([1.0], "[1.0] (list)"),
        (1 + 1j, "(1+1j) (complex)"),
        (np.array([1.0, 2.0]), "array([1., 2.]) (ndarray)"),
        (torch.tensor([1.0, 2.0]), "tensor([1., 2.]) (Tensor)"),
        (torch.tensor(math.nan), "tensor(nan) (Tensor)"),
        ({}, "{} (dict)"),
        ({"rewards": [1.0]}, "{'rewards': [1.0]} (dict)"),
        ({"reward": None}, "{'reward': None} (dict)"),
        ({"reward": 1.0, "answer_correct": "yes"}, "{'reward': 1.0, 'answer_correct': 'yes'} (dict)"),
    ],
)
def test_anything_else_is_invalid_and_says_what_came_back(value: Any, came: str) -> None:
    score = as_score(value)
    assert score.verdict == "invalid"
    assert score.detail.startswith("returned ") and came in score.detail
    assert score.detail.endswith("; return a finite number, a Score, or a dict with a reward")


@pytest.mark.parametrize("value", [1e300, -1e300, 2e9, {"reward": 1e300}, torch.tensor(1e30)])
def test_a_reward_that_is_too_large_to_train_on_is_invalid(value: Any) -> None:
    score = as_score(value)
    assert score.verdict == "invalid"
    assert score.detail.endswith(" cannot be trained on; return at most 1e+09 in size")
    given = Score(reward=1e300, answer_correct=True, format_valid=True, verdict="ok")
    assert as_score(given).verdict == "invalid"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"reward": 1.0}, (1.0, True, True, "ok")),
        ({"reward": 0.4}, (0.4, False, True, "wrong")),
        ({"reward": 0.4, "answer_correct": True}, (0.4, True, True, "ok")),
        ({"reward": 2.0, "answer_correct": np.bool_(False)}, (2.0, False, True, "wrong")),
        ({"reward": 1.0, "format_valid": False}, (1.0, True, False, "ok")),
        ({"reward": torch.tensor(1.0), "answer_correct": None, "format_valid": None}, (1.0, True, True, "ok")),
    ],
)
def test_a_dict_may_say_what_is_right(value: dict[str, Any], expected: tuple[float, bool, bool, str]) -> None:
    assert told(as_score(value)) == expected


def test_numbers_beside_the_reward_are_reported_and_the_detail_is_one_line() -> None:
    value = {
        "reward": 0.5,
        "detail": "short\nof it",
        "brevity": np.float32(0.5),
        "words": 3,
        "note": "x",
        "bad": math.nan,
    }
    score = as_score(value)
    assert score.breakdown == {"brevity": 0.5, "words": 3.0}
    assert score.detail == "short of it"


def test_a_score_of_the_users_is_taken_in_plain_types() -> None:
    given = Score(
        reward=np.float32(0.5),
        answer_correct=np.bool_(True),
        format_valid=1,
        verdict="ok",
        detail="fine",
        breakdown={"a": torch.tensor(2.0), "b": None},
    )
    score = as_score(given)
    assert score == Score(
        reward=0.5, answer_correct=True, format_valid=True, verdict="ok", detail="fine", breakdown={"a": 2.0}
    )
    assert [type(value) for value in (score.reward, score.answer_correct, score.breakdown["a"])] == [float, bool, float]


def test_a_score_of_the_users_may_be_invalid_whatever_its_reward() -> None:
    given = Score(reward=math.nan, answer_correct=False, format_valid=False, verdict="invalid", detail="no judge")
    assert as_score(given) == Score(
        reward=0.0, answer_correct=False, format_valid=False, verdict="invalid", detail="no judge"
    )
    assert as_score(replace(given, answer_correct=True)) == as_score(given), "evaluations count it as not correct"


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"verdict": "right"}, "returned a Score with the verdict 'right'; use ok, wrong or invalid"),
        ({"reward": math.inf}, "returned a Score with the reward inf (float); return a finite number"),
    ],
)
def test_a_score_of_the_users_that_means_nothing_is_invalid(changes: dict[str, Any], detail: str) -> None:
    fields: dict[str, Any] = {"reward": 1.0, "answer_correct": True, "format_valid": True, "verdict": "ok"}
    score = as_score(Score(**fields | changes))
    assert score.verdict == "invalid" and score.detail.startswith(detail)


REWARDS = [1.0, 0.0, 0.5]


@pytest.mark.parametrize(
    "value",
    [
        REWARDS,
        tuple(REWARDS),
        np.array(REWARDS),
        torch.tensor(REWARDS),
        [torch.tensor(reward) for reward in REWARDS],
        {"rewards": REWARDS},
        {"rewards": torch.tensor(REWARDS), "scores": None, "extra_logs": None},
        [{"reward": 1.0}, as_score(0.0), 0.5],
    ],
)
def test_a_group_gets_a_reward_each_from_a_list_an_array_or_a_tensor(value: Any) -> None:
    scores = as_scores(value, 3)
    assert [score.reward for score in scores] == REWARDS
    assert [score.answer_correct for score in scores] == [True, False, False]


def test_scores_decide_what_is_right_where_there_are_any() -> None:
    scores = as_scores({"rewards": [2.0, 0.5, 1.0], "scores": np.array([0.0, 1.0, 0.9])}, 3)
    assert [told(score) for score in scores] == [
        (2.0, False, True, "wrong"),
        (0.5, True, True, "ok"),
        (1.0, False, True, "wrong"),
    ]


def test_logs_are_reported_by_response_or_for_all() -> None:
    logs = {"length": [1, 2], "both": 7, "not one each": [1, 2, 3], "text": ["a", "b"], "some": [None, 1.0]}
    first, second = as_scores({"rewards": [1.0, 1.0], "extra_logs": logs}, 2)
    assert first.breakdown == {"length": 1.0, "both": 7.0}
    assert second.breakdown == {"length": 2.0, "both": 7.0, "some": 1.0}


@pytest.mark.parametrize(
    ("value", "detail"),
    [
        (None, "returned None for 2 responses"),
        (1.0, "returned 1.0 (float) for 2 responses"),
        ([1.0], "returned 1 rewards for 2 responses"),
        (torch.zeros(3), "returned 3 rewards for 2 responses"),
        (torch.tensor(1.0), "returned tensor(1.) (Tensor) for 2 responses"),
        ({"reward": [1.0, 2.0]}, "returned {'reward': [1.0, 2.0]} (dict) for 2 responses"),
        ({"rewards": None}, "returned {'rewards': None} (dict) for 2 responses"),
        ("12", "returned '12' (str) for 2 responses"),
        ({"rewards": [1.0, 1.0], "scores": [1.0]}, 'returned 1 as "scores" of 2 responses'),
        ({"rewards": [1.0, 1.0], "scores": 1.0}, 'returned 1.0 (float) as "scores" of 2 responses'),
    ],
)
def test_another_number_of_rewards_makes_the_group_invalid(value: Any, detail: str) -> None:
    scores = as_scores(value, 2)
    assert [score.verdict for score in scores] == ["invalid"] * 2
    assert scores[0].detail.startswith(detail)


def test_one_reward_or_score_that_is_no_number_costs_its_response_only() -> None:
    scores = as_scores({"rewards": [1.0, math.nan, 1.0], "scores": [1.0, 1.0, None]}, 3)
    assert [score.verdict for score in scores] == ["ok", "invalid", "invalid"]
    assert scores[1].detail.startswith("returned nan (float)")
    assert scores[2].detail == 'returned None among its "scores"; return finite numbers'
