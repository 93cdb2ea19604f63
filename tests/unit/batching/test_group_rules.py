"""Test which samples count, which are trained, why a group may have no effect, what length takes off."""

import math
from dataclasses import replace

import pytest

from coati_rl.batching.group_rules import (
    GroupRules,
    LengthLimit,
    is_in_loss,
    is_valid,
    over_length_penalties,
    reason_without_effect,
)
from coati_rl.types import Baseline, Score
from tests.unit.batching.trajectories import masked

PLAIN = GroupRules(max_new_tokens=8)
DAPO = GroupRules(max_new_tokens=8, filter_range=(0.0, 1.0))
IN_RANGE = GroupRules(max_new_tokens=8, filter_range=(0.01, 0.99))
WHOLE = GroupRules(max_new_tokens=8, filter_truncated_response=True)


def test_a_sample_is_valid_if_it_was_scored_and_has_a_token(group_of):
    group = group_of([(1.0, 1), (0.0, 0), (1.0, 3, "invalid"), (math.nan, 3), (math.inf, 3), (-2.0, 1)])
    assert is_valid(group).tolist() == [True, False, False, False, False, True]
    group = group_of([(1e300, 1), (-1e300, 1), (1e10, 1), (1e9, 1), (-1e9, 1)])  # (1e300 - 0) ** 2 is no float64
    assert is_valid(group).tolist() == [False, False, False, True, True]


def test_no_sample_is_valid_where_the_greedy_answer_that_they_are_compared_with_could_not_be_scored(group_of):
    group = group_of([(1.0, 1), (0.0, 2)])
    score = Score(reward=0.5, answer_correct=False, format_valid=True, verdict="wrong")
    for changes, is_valid_now in (
        ({}, True),
        ({"verdict": "invalid"}, False),
        ({"reward": math.nan}, False),
        ({"reward": 1e10}, False),
    ):
        compared = replace(group, baseline=Baseline(score=replace(score, **changes), num_tokens=3))
        assert is_valid(compared).tolist() == [is_valid_now] * 2
        assert reason_without_effect(compared, PLAIN) == (None if is_valid_now else "undecidable")


def test_without_rules_every_valid_sample_is_in_the_loss(group_of):
    group = group_of([(1.0, 1), (1.0, 2, "invalid"), (1.0, 8, "ok", "length")])
    assert is_in_loss(group, PLAIN).tolist() == [True, False, True]
    assert reason_without_effect(group, PLAIN) is None


@pytest.mark.parametrize(
    ("filter_range", "trained"),
    [
        ((0.01, 0.99), {1, 2, 3, 4, 5, 6, 7}),  # of 8 samples, 1 / 8 to 7 / 8 right
        ((0.125, 0.875), {2, 3, 4, 5, 6}),  # strictly: 1 / 8 and 7 / 8 are the bounds
        ((0.0, 1.0), {1, 2, 3, 4, 5, 6, 7}),
        ((0.3, 0.6), {3, 4}),
    ],
)
def test_a_group_is_trained_if_its_mean_score_is_strictly_inside_of_the_range(group_of, filter_range, trained):
    rules = GroupRules(max_new_tokens=8, filter_range=filter_range)
    for num_right in range(9):
        group = group_of([(float(index < num_right), 1) for index in range(8)])
        assert is_in_loss(group, rules).tolist() == [num_right in trained] * 8


@pytest.mark.parametrize("bound", [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9])
def test_a_bound_in_tenths_is_met_by_as_many_of_ten(group_of, bound):
    group = group_of([(float(index < round(10 * bound)), 1) for index in range(10)])
    assert not is_in_loss(group, GroupRules(max_new_tokens=8, filter_range=(bound, 1.0))).any()
    assert not is_in_loss(group, GroupRules(max_new_tokens=8, filter_range=(0.0, bound))).any()


def test_the_mean_is_over_valid_samples(group_of):
    rules = GroupRules(max_new_tokens=8, filter_range=(0.4, 0.6))
    group = group_of([(1.0, 1), (0.0, 1), (1.0, 1, "invalid"), (1.0, 0)])  # 1 right of 2
    assert is_in_loss(group, rules).tolist() == [True, True, False, False]


def with_answers(group, *answers):
    scores = [replace(score, answer_correct=right) for score, right in zip(group.scores, answers, strict=True)]
    return replace(group, scores=tuple(scores))


def test_the_filter_looks_at_what_is_earned_and_not_at_answers_that_earn_nothing(group_of):
    # The answers are right, the format is broken: nothing is paid, and nothing is learned from four zeros.
    paid_in_part = with_answers(group_of([(1.0, 1), (1.0, 1), (0.0, 1), (0.0, 1)]), True, True, True, True)
    never_paid = with_answers(group_of([(0.0, 1)] * 4), True, False, True, False)
    assert reason_without_effect(paid_in_part, DAPO) is None
    assert reason_without_effect(never_paid, DAPO) == "always wrong"


def test_graded_scores_are_trained_though_none_of_them_is_right(group_of):
    graded = with_answers(group_of([(0.2, 1), (0.9, 1), (0.5, 1), (0.7, 1)]), False, False, False, False)
    assert is_in_loss(graded, DAPO).all()  # a mean of 0.575
    assert not is_in_loss(graded, GroupRules(max_new_tokens=8, filter_range=(0.6, 1.0))).any()


@pytest.mark.parametrize("group_size", [2, 8, 100, 1000])
def test_dapos_condition_is_that_some_answers_are_right_and_some_are_not_for_any_group_size(group_of, group_size):
    trained = [
        num_right
        for num_right in {0, 1, 2, group_size - 1, group_size}
        if is_in_loss(group_of([(float(index < num_right), 1) for index in range(group_size)]), DAPO).all()
    ]
    assert set(trained) == {1, 2, group_size - 1} - {group_size}


def test_rewards_beyond_0_and_1_are_held_to_them_and_a_filter_score_takes_their_place(group_of):
    wrong, right, mixed = (group_of([(reward, 1) for reward in rewards]) for rewards in ((-1, -1), (1, 3), (-1, 1)))
    reasons = [reason_without_effect(group, DAPO) for group in (wrong, right, mixed)]
    assert reasons == ["always wrong", "always right", None]
    told = replace(right, scores=tuple(replace(score, filter_score=score.reward / 4) for score in right.scores))
    assert reason_without_effect(told, DAPO) is None


def test_a_truncated_response_is_left_out_of_the_loss_but_counts_in_the_accuracy(group_of):
    rules = GroupRules(max_new_tokens=8, filter_range=(0.01, 0.99), filter_truncated_response=True)
    group = group_of([(1.0, 1), (1.0, 2), (0.0, 8, "ok", "length")])
    assert is_in_loss(group, rules).tolist() == [True, True, False]
    assert reason_without_effect(group, rules) is None


@pytest.mark.parametrize(
    ("samples", "rules", "reason"),
    [
        ([(1.0, 1), (1.0, 2)], IN_RANGE, "always right"),
        ([(0.0, 1), (0.0, 2)], IN_RANGE, "always wrong"),
        ([(1.0, 1), (0.0, 2, "invalid")], IN_RANGE, "always right"),
        ([(1.0, 1), (0.0, 1), (0.0, 1)], GroupRules(max_new_tokens=8, filter_range=(0.5, 0.9)), "out of range"),
        ([(1.0, 8, "ok", "length"), (0.0, 8, "ok", "length")], WHOLE, "truncated"),
        ([(0.0, 8, "ok", "length"), (0.0, 8, "invalid")], WHOLE, "truncated"),
        ([(1.0, 1, "invalid"), (0.0, 0)], IN_RANGE, "undecidable"),
        ([(1.0, 8, "invalid", "length")], WHOLE, "undecidable"),
        ([(1.0, 1), (1.0, 2)], PLAIN, None),
        ([(1.0, 1), (0.0, 8, "ok", "length")], WHOLE, None),
    ],
)
def test_a_group_without_effect_has_a_reason(group_of, samples, rules, reason):
    assert reason_without_effect(group_of(samples), rules) == reason


def test_answers_that_were_all_cut_off_are_truncated_before_they_are_wrong(group_of):
    group = group_of([(0.0, 8, "ok", "length")] * 2)
    both = GroupRules(max_new_tokens=8, filter_range=(0.01, 0.99), filter_truncated_response=True)
    assert reason_without_effect(group, both) == "truncated"
    assert reason_without_effect(group, IN_RANGE) == "always wrong"


def test_a_group_of_which_some_answers_were_cut_off_has_the_reason_of_the_others(group_of):
    both = GroupRules(max_new_tokens=8, filter_range=(0.01, 0.99), filter_truncated_response=True)
    group = group_of([(1.0, 1), (1.0, 8, "ok", "length")])
    assert reason_without_effect(group, both) == "always right"


def test_a_task_has_its_own_limit_of_length(group_of):
    limits = {
        "long": LengthLimit(max_new_tokens=12, over_length_cache=2),
        "any": LengthLimit(max_new_tokens=9, over_length_cache=None),
    }
    rules = GroupRules(max_new_tokens=8, over_length_cache=4, length_limits=limits)
    group = group_of([(1.0, 8), (1.0, 11)])
    for task, penalties in (("default", [-1.0, -1.0]), ("long", [0.0, -0.5]), ("any", [0.0, 0.0])):
        of_task = replace(group, prompt=replace(group.prompt, task=task))
        assert over_length_penalties(of_task, rules).tolist() == penalties, task


def test_length_takes_off_reward_from_the_cache_up_to_the_cap_and_no_more_past_it(group_of):
    # From 10 - 4 = 6 tokens on: 1 / 4 of the scale a token.
    rules = GroupRules(max_new_tokens=10, over_length_cache=4, reward_scale=2.0)
    group = group_of([(1.0, length) for length in (0, 1, 6, 7, 8, 10, 12)])
    assert over_length_penalties(group, rules).tolist() == [0, 0, 0, -0.5, -1, -2, -2]


def test_without_a_cache_length_takes_off_nothing(group_of):
    assert over_length_penalties(group_of([(1.0, 1), (1.0, 12)]), PLAIN).tolist() == [0, 0]


def test_a_forked_episode_is_one_of_the_group_with_the_length_of_all_its_turns(forked_group):
    group = forked_group()
    assert is_valid(group).tolist() == [True, True]
    assert is_in_loss(group, WHOLE).tolist() == [False, True]  # one turn of the first episode hit the limit
    rules = GroupRules(max_new_tokens=8, over_length_cache=4)
    assert over_length_penalties(group, rules).tolist() == [-0.5, 0.0]  # of 6 and 2 tokens


def test_an_episode_is_valid_if_one_of_its_forks_has_a_token(forked_group):
    first, fork, other = forked_group().trajectories
    no_token, none = masked(first, [False] * 10), masked(fork, [False] * 7)
    assert is_valid(forked_group((no_token, fork, other))).tolist() == [True, True]
    assert is_valid(forked_group((no_token, none, other))).tolist() == [False, True]
