"""Test the score of an episode whose environment gives rewards, alone and beside those of its last answer."""

import pytest

from coati_rl.types import Score, TokenReward
from producer.environments.episode_scores import environment_score, with_environment_rewards
from tests.unit.batching.trajectories import trajectory

ANSWER = Score(reward=0.5, answer_correct=True, format_valid=True, verdict="ok", detail="said", filter_score=0.25)


def rewarded(*rewards, **where):
    """One turn of two tokens with these rewards, each (name, value)."""
    given = tuple(TokenReward(position=4, name=name, value=value) for name, value in rewards)
    return trajectory([1, 2, 3, 10, 11], (3, 5), rewards=given, **where)


def test_rewards_of_one_name_add_up_over_turns_and_forks_and_the_sum_over_names_is_the_reward():
    parts = (rewarded(("hit", 0.5), ("cost", -0.25)), rewarded(("hit", 1.0)))
    score = environment_score(parts, correct_from=1.25)
    assert (score.reward, score.breakdown) == (1.25, {"hit": 1.5, "cost": -0.25})
    assert (score.answer_correct, score.verdict, score.format_valid) == (True, "ok", True), "from 1.25 on"
    almost = environment_score(parts, correct_from=1.26)
    assert (almost.reward, almost.answer_correct, almost.verdict) == (1.25, False, "wrong")


def test_a_reward_without_a_name_has_no_breakdown():
    assert environment_score((rewarded(("env", 1.0)),), correct_from=1.0).breakdown == {}
    assert environment_score((rewarded(),), correct_from=1.0).reward == 0.0


def test_they_are_added_to_the_score_of_the_last_answer_which_keeps_all_else_and_its_own_parts():
    answer = Score(**{**{name: getattr(ANSWER, name) for name in Score.__dataclass_fields__}, "breakdown": {"a": 0.1}})
    score = with_environment_rewards(answer, (rewarded(("hit", 2.0)),))
    assert (score.reward, score.breakdown) == (2.5, {"hit": 2.0, "response": 0.5, "a": 0.1})
    kept = ("answer_correct", "format_valid", "verdict", "detail", "filter_score")
    assert [getattr(score, name) for name in kept] == [getattr(answer, name) for name in kept]


def test_without_rewards_or_a_verdict_the_score_stays_as_it_is():
    undecided = Score(reward=0.0, answer_correct=False, format_valid=False, verdict="invalid")
    assert with_environment_rewards(ANSWER, (rewarded(),)) is ANSWER
    assert with_environment_rewards(undecided, (rewarded(("hit", 2.0)),)) is undecided


@pytest.mark.parametrize("value", [6e8, -6e8])
def test_rewards_that_add_up_to_what_cannot_be_trained_are_invalid(value):
    parts = (rewarded(("env", value)), rewarded(("env", value)))
    for score in (environment_score(parts, correct_from=1.0), with_environment_rewards(ANSWER, parts)):
        assert score.verdict == "invalid" and "the rewards add up to" in score.detail
