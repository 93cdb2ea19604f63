"""Test what a step's record says of its rollouts."""

from dataclasses import replace

import pytest

from coati_rl.batching.group_rules import GroupRules
from coati_rl.coordinator.rollout_statistics import rollout_statistics
from coati_rl.types import Baseline, Score

PLAIN = GroupRules(max_new_tokens=8)


def statistics(groups, dropped=(), rules=PLAIN):
    return rollout_statistics(groups, dropped, rules=rules, staleness={7: 0, 5: 0, 3: 1}.__getitem__)


def test_rollout_statistics_are_means_over_what_was_scored(group_of):
    groups = [
        group_of([(1.0, 2), (0.0, 4)], version=5),
        group_of([(0.5, 6), (9.0, 8, "invalid")], version=3, finish_reason="length"),
    ]
    record = statistics(groups)
    assert record["reward_mean"] == 0.5  # of 1.0, 0.0, 0.5
    assert record["answer_accuracy"] == pytest.approx(2 / 3)  # a reward above 0 is a correct answer here
    assert record["samples_invalid"] == 1
    assert record["samples_in_loss"] == 3
    assert record["response_tokens_mean"] == 5.0  # (2 + 4 + 6 + 8) / 4
    assert record["truncated_fraction"] == 0.5
    assert record["over_length_penalty_mean"] is None
    assert record["staleness_mean"] == 14 / 20  # by tokens
    assert record["staleness_max"] == 1
    assert record["num_prompt_tokens"] == 4 * 3
    assert record["num_response_tokens"] == 20


def test_greedy_answers_are_no_samples_and_have_a_mean_of_their_own(group_of):
    greedy = Score(reward=0.25, answer_correct=True, format_valid=True, verdict="ok")
    groups = [group_of([(1.0, 2), (0.0, 4)], version=5), group_of([(0.5, 6)], version=3)]
    before = statistics(groups)
    assert before["baseline_reward_mean"] is None
    compared = [
        replace(groups[0], baseline=Baseline(score=greedy, num_tokens=100)),
        replace(groups[1], baseline=Baseline(score=replace(greedy, reward=1.0), num_tokens=1)),
    ]
    assert statistics(compared) == before | {"baseline_reward_mean": 0.625}
    lost = replace(groups[1], baseline=Baseline(score=replace(greedy, verdict="invalid"), num_tokens=1))
    record = statistics([compared[0], lost])
    assert (record["baseline_reward_mean"], record["samples_invalid"], record["reward_mean"]) == (0.25, 1, 0.5)


def test_groups_that_were_dropped_count_in_all_but_staleness_and_the_loss(group_of):
    rules = GroupRules(max_new_tokens=8, filter_range=(0.01, 0.99))
    trained = group_of([(1.0, 2), (0.0, 2)], version=5)
    dropped = [group_of([(1.0, 4), (1.0, 8, "ok", "length")], version=3), group_of([(0.0, 1), (9.0, 7, "invalid")])]
    record = statistics([trained], dropped, rules)
    assert record["reward_mean"] == record["answer_accuracy"] == 3 / 5  # 1, 0, then 1, 1, then 0
    assert (record["samples_invalid"], record["samples_in_loss"]) == (1, 2)
    assert record["response_tokens_mean"] == 4.0  # (2 + 2 + 4 + 8 + 1 + 7) / 6
    assert record["truncated_fraction"] == pytest.approx(1 / 6)
    assert (record["num_prompt_tokens"], record["num_response_tokens"]) == (6 * 3, 24)
    assert (record["staleness_mean"], record["staleness_max"]) == (0.0, 0)


def test_a_group_that_takes_its_place_without_effect_adds_nothing_to_the_samples_in_the_loss(group_of):
    rules = GroupRules(max_new_tokens=8, filter_range=(0.01, 0.99), filter_truncated_response=True)
    groups = [group_of([(1.0, 1), (1.0, 1)]), group_of([(1.0, 1), (0.0, 8, "ok", "length")])]
    assert statistics(groups, rules=rules)["samples_in_loss"] == 1


def test_the_penalty_is_a_mean_over_valid_samples_and_not_part_of_the_reward(group_of):
    rules = GroupRules(max_new_tokens=8, over_length_cache=4)
    trained = group_of([(1.0, 8), (0.0, 6)])
    dropped = group_of([(1.0, 4), (9.0, 8, "invalid")])
    record = statistics([trained], [dropped], rules)
    assert record["over_length_penalty_mean"] == -0.5  # of -1, -0.5, 0
    assert record["reward_mean"] == pytest.approx(2 / 3)
    assert str(statistics([group_of([(1.0, 2)])], rules=rules)["over_length_penalty_mean"]) == "0.0", "not -0.0"


def test_without_a_valid_sample_there_is_no_mean_rather_than_a_mean_of_zero(group_of):
    rules = GroupRules(max_new_tokens=8, over_length_cache=4)
    record = statistics([group_of([(1.0, 2, "invalid"), (1.0, 0)])], rules=rules)
    keys = ("reward_mean", "answer_accuracy", "format_accuracy", "over_length_penalty_mean")
    assert [record[key] for key in keys] == [None] * 4
    assert (record["samples_invalid"], record["response_tokens_mean"]) == (2, 1.0)


def with_breakdowns(group, *breakdowns):
    scores = [replace(score, breakdown=parts) for score, parts in zip(group.scores, breakdowns, strict=True)]
    return replace(group, scores=tuple(scores))


def test_each_part_of_a_reward_has_a_mean_over_the_valid_samples_that_have_it(group_of):
    trained = with_breakdowns(group_of([(1.0, 2), (0.0, 2)]), {"boxed": 1.0, "brevity.score": -0.5}, {"boxed": 0.0})
    dropped = with_breakdowns(group_of([(9.0, 2, "invalid"), (1.0, 2)]), {"boxed": 9.0}, {"boxed": 0.5})
    record = statistics([trained], [dropped])
    assert {key: value for key, value in record.items() if key.startswith("reward/")} == {
        "reward/boxed": 0.5,  # of 1, 0, 0.5
        "reward/brevity.score": -0.5,
    }


def test_each_metric_of_an_environment_has_a_mean_over_the_valid_episodes_that_have_it(group_of):
    records = ({"turns": [], "metrics": {"tools": 3.0, "b": 1.0}}, {"turns": [], "metrics": {"tools": 2.0}})
    trained = replace(group_of([(1.0, 2), (0.0, 2)]), records=records)
    dropped = replace(group_of([(9.0, 2, "invalid"), (1.0, 2)]), records=({"metrics": {"tools": 99.0}}, {}))
    record = statistics([trained, group_of([(1.0, 2)])], [dropped])
    assert {key: value for key, value in record.items() if key.startswith("agent/")} == {
        "agent/b_mean": 1.0,
        "agent/tools_mean": 2.5,
    }


def test_one_reward_has_no_parts(group_of):
    assert not [key for key in statistics([group_of([(1.0, 2)])]) if key.startswith("reward/")]


def test_a_sample_is_an_episode_with_all_that_its_forks_have_sampled(forked_group):
    record = rollout_statistics([forked_group()], (), rules=PLAIN, staleness={7: 1, 8: 0}.__getitem__)
    assert (record["reward_mean"], record["samples_in_loss"], record["samples_invalid"]) == (0.5, 2, 0)
    assert record["response_tokens_mean"] == 4.0  # (2 + 3 + 1) + 2 tokens of two episodes
    assert record["truncated_fraction"] == 0.5
    assert (record["num_prompt_tokens"], record["num_response_tokens"]) == (9, 8)
    assert record["staleness_mean"] == 7 / 8  # each sampled token once


def test_the_spread_of_rewards_is_over_valid_samples_and_a_group_of_equal_rewards_is_constant(group_of):
    groups = [
        group_of([(0.0, 2), (1.0, 2)]),
        group_of([(0.5, 2), (0.5, 2), (9.0, 2, "invalid")]),
        group_of([(0.5, 2), (0.5, 2)]),
    ]
    alone = group_of([(1.0, 2), (9.0, 2, "invalid")])
    assert statistics(groups[:2], groups[2:])["reward_std"] == pytest.approx((0.5 / 6) ** 0.5)  # 0, 1 and four of 0.5
    assert statistics(groups, [alone])["constant_group_fraction"] == pytest.approx(2 / 3), "one sample is no group"
    assert statistics([group_of([(1 / 3, 2)] * 3)] * 43)["reward_std"] == 0.0, "not 5.6e-17"
    right_and_wrong = statistics([group_of([(1.0, 2), (1.0, 2)]), group_of([(0.0, 2), (0.0, 2), (1.0, 2, "invalid")])])
    assert (right_and_wrong["groups_all_correct"], right_and_wrong["groups_all_wrong"]) == (1, 1)
    assert statistics(groups[:1], [alone])["groups_all_correct"] == 0, "a mixed group, and one of one valid sample"
    nothing = statistics([group_of([(1.0, 2, "invalid"), (1.0, 2, "invalid")])])
    assert (nothing["reward_std"], nothing["constant_group_fraction"]) == (None, None)


def test_responses_are_the_same_if_all_their_sampled_tokens_are(group_of, forked_group):
    record = statistics([group_of([(1.0, 2), (0.0, 2)]), group_of([(1.0, 2), (0.0, 5, "invalid")])])
    assert (record["distinct_response_fraction"], record["response_tokens_max"]) == (0.5, 5)
    assert statistics([group_of([(1.0, 2), (0.0, 2), (1.0, 2), (0.0, 2)])])["distinct_response_fraction"] == 0.25
    forked = forked_group()
    lengths = [sum(each.num_loss_tokens for each in forked.trajectories if each.episode == n) for n in (0, 1)]
    record = rollout_statistics([forked], [], rules=PLAIN, staleness=lambda version: 0)
    assert record["response_tokens_max"] == max(lengths), "over the forks of an episode"
