"""Which samples count, which are trained, why a group may have no effect, what length takes off."""

import math

import pytest

from coati_rl.data.group_rules import (
    GroupRules,
    is_in_loss,
    is_valid,
    over_length_penalties,
    reason_without_effect,
)

PLAIN = GroupRules(max_new_tokens=8)
IN_RANGE = GroupRules(max_new_tokens=8, filter_range=(0.01, 0.99))
WHOLE = GroupRules(max_new_tokens=8, filter_truncated_response=True)


def test_a_sample_is_valid_if_it_was_scored_and_has_a_token(group_of):
    group = group_of([(1.0, 1), (0.0, 0), (1.0, 3, "invalid"), (math.nan, 3), (math.inf, 3), (-2.0, 1)])
    assert is_valid(group).tolist() == [True, False, False, False, False, True]


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
def test_a_group_is_trained_if_its_accuracy_is_strictly_inside_of_the_range(group_of, filter_range, trained):
    rules = GroupRules(max_new_tokens=8, filter_range=filter_range)
    for num_right in range(9):
        group = group_of([(float(index < num_right), 1) for index in range(8)])
        assert is_in_loss(group, rules).tolist() == [num_right in trained] * 8


@pytest.mark.parametrize("bound", [0.1, 0.2, 0.3, 0.4, 0.6, 0.7, 0.8, 0.9])
def test_a_bound_in_tenths_is_met_by_as_many_of_ten(group_of, bound):
    group = group_of([(float(index < round(10 * bound)), 1) for index in range(10)])
    assert not is_in_loss(group, GroupRules(max_new_tokens=8, filter_range=(bound, 1.0))).any()
    assert not is_in_loss(group, GroupRules(max_new_tokens=8, filter_range=(0.0, bound))).any()


def test_accuracy_is_that_of_the_answers_and_over_valid_samples(group_of):
    rules = GroupRules(max_new_tokens=8, filter_range=(0.4, 0.6))
    group = group_of([(0.1, 1), (0.0, 1), (1.0, 1, "invalid"), (1.0, 0)])  # 1 right of 2
    assert is_in_loss(group, rules).tolist() == [True, True, False, False]


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


def test_length_takes_off_reward_from_the_cache_up_to_the_cap_and_no_more_past_it(group_of):
    # From 10 - 4 = 6 tokens on: 1 / 4 of the scale a token.
    rules = GroupRules(max_new_tokens=10, over_length_cache=4, reward_scale=2.0)
    group = group_of([(1.0, length) for length in (0, 1, 6, 7, 8, 10, 12)])
    assert over_length_penalties(group, rules).tolist() == [0, 0, 0, -0.5, -1, -2, -2]


def test_without_a_cache_length_takes_off_nothing(group_of):
    assert over_length_penalties(group_of([(1.0, 1), (1.0, 12)]), PLAIN).tolist() == [0, 0]
