"""Test the samples of a scored group: advantages over the valid ones, weights, and filtering."""

from dataclasses import replace

import numpy as np
import pytest

from coati_rl.algorithms.advantage import group_mean, group_norm, remax
from coati_rl.algorithms.reward_scaling import RewardScaling
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.sample_builder import build_samples, count_episodes, token_weights
from coati_rl.errors import RunError
from coati_rl.types import Baseline, Score
from tests.unit.batching.trajectories import masked, trajectory


def build(group, *, variation="token_level", estimator=group_norm, **rules):
    rules = GroupRules(**{"max_new_tokens": 8, **rules})
    return build_samples(group, rules=rules, loss_variation=variation, estimator=estimator)


def advantages(samples):
    """By the response's place in its group."""
    return {sample.number: float(sample.arrays["advantages"]) for sample in samples}


def test_a_sample_is_the_prompt_and_what_was_sampled(group_of):
    group = group_of([(1.0, 2), (0.0, 3)])  # (reward, response tokens); the prompt is three tokens: 1, 2, 3
    first, second = build(group)
    assert (first.prefix_ids.tolist(), first.token_ids.tolist(), len(first)) == ([1, 2, 3], [10, 11], 5)
    assert first.arrays["rollout_logprobs"].tolist() == [-0.5, -0.5]
    assert (first.arrays["policy_version"].tolist(), first.arrays["temperature"]) == ([7, 7], np.float32(0.7))
    assert first.loss_mask.all()
    assert second.token_ids.tolist() == [10, 11, 12]


def test_advantages_are_standardised_with_the_unbiased_deviation(group_of):
    samples = build(group_of([(1.0, 1), (0.0, 1)]))
    # mean 0.5, deviation sqrt((0.25 + 0.25) / (2 - 1)) = 0.7071: +-0.5 / 0.7071
    assert advantages(samples) == pytest.approx({0: 0.70711, 1: -0.70711}, abs=1e-5)


def test_the_estimator_is_the_one_that_is_given(group_of):
    assert advantages(build(group_of([(1.0, 1), (0.0, 1)]), estimator=group_mean)) == {0: 0.5, 1: -0.5}


def test_samples_are_compared_with_the_greedy_answer_scaled_and_punished_for_its_length_like_them(group_of):
    greedy = Score(reward=0.5, answer_correct=False, format_valid=True, verdict="wrong")
    group = replace(group_of([(1.0, 6), (0.0, 2)]), baseline=Baseline(score=greedy, num_tokens=7))
    assert advantages(build(group, estimator=remax)) == {0: 0.5, 1: -0.5}
    # Of 8 tokens the last 4 are punished: 6 tokens by -0.5, the 7 of the greedy answer by -0.75, to -0.25.
    assert advantages(build(group, estimator=remax, over_length_cache=4)) == {0: 0.75, 1: 0.25}
    samples = build_samples(
        group,
        rules=GroupRules(max_new_tokens=8),
        loss_variation="token_level",
        estimator=remax,
        scaling=RewardScaling(mean=0.25, std=0.5, clip=(-0.25, 1.0)),  # 1.5, -0.5 and 0.5, clipped
    )
    assert advantages(samples) == {0: 0.5, 1: -0.75}


def test_without_a_greedy_answer_the_prompt_is_named(group_of):
    with pytest.raises(RunError, match=r"fails on prompt p0 .* the baseline, which is not given"):
        build(group_of([(1.0, 1)]), estimator=remax)


def test_a_token_weighs_one_or_its_share_of_the_sample_or_of_the_longest_response(group_of):
    group = group_of([(1.0, 2), (0.0, 4)])
    weights = {
        variation: [sample.arrays["loss_weights"] for sample in build(group, variation=variation)]
        for variation in ("sample_level", "token_level", "constant")
    }
    assert weights == {
        "sample_level": [0.5, 0.25],
        "token_level": [1.0, 1.0],
        "constant": [0.125, 0.125],  # 8 tokens at most
    }


def test_a_sample_that_nobody_could_score_is_left_out_of_group_statistics_and_loss(group_of):
    with_invalid = build(group_of([(1.0, 1), (0.0, 1), (-99.0, 1, "invalid")]))
    assert advantages(with_invalid) == advantages(build(group_of([(1.0, 1), (0.0, 1)])))


def test_a_response_of_no_token_is_no_sample_and_one_of_a_single_token_is(group_of):
    samples = build(group_of([(1.0, 0), (0.0, 1), (1.0, 1)]), variation="sample_level")
    assert [(sample.number, sample.arrays["loss_weights"]) for sample in samples] == [(1, 1.0), (2, 1.0)]
    assert advantages(samples) == pytest.approx({1: -0.70711, 2: 0.70711}, abs=1e-5)


def test_seven_equal_rewards_give_an_advantage_of_exactly_nothing(group_of):
    assert advantages(build(group_of([(0.7, 1)] * 7))) == dict.fromkeys(range(7), 0.0)
    assert advantages(build(group_of([(0.7, 7)] * 7), over_length_cache=3)) == dict.fromkeys(range(7), 0.0)


def test_length_takes_off_reward_before_the_advantage_is_formed(group_of):
    group = group_of([(1.0, 8), (1.0, 6), (1.0, 4)])  # the cap, half of the cache, the beginning of the cache
    samples = build(group, over_length_cache=4, reward_scale=2.0, estimator=group_mean)
    assert advantages(samples) == {0: -1.0, 1: 0.0, 2: 1.0}  # of rewards 1 - 2, 1 - 1, 1 - 0


def test_a_truncated_response_is_no_sample_but_is_what_the_others_are_compared_with(group_of):
    group = group_of([(1.0, 1), (0.0, 2), (0.0, 8, "ok", "length")])
    samples = build(group, filter_truncated_response=True, estimator=group_mean)
    assert advantages(samples) == pytest.approx({0: 2 / 3, 1: -1 / 3})  # the mean is 1 / 3


@pytest.mark.parametrize(
    "samples", [[(1.0, 1), (1.0, 2)], [(0.0, 1)], [(1.0, 8, "ok", "length"), (0.0, 8, "ok", "length")]]
)
def test_a_group_that_is_filtered_has_no_sample(group_of, samples):
    assert build(group_of(samples), filter_range=(0.01, 0.99), filter_truncated_response=True) == []


def test_an_estimator_that_fails_ends_the_run_and_says_on_what(group_of):
    def broken(rewards):
        raise KeyError("x")

    with pytest.raises(RunError, match=r"fails on prompt p0 with rewards \[1.0, 0.0\]: KeyError: 'x'"):
        build(group_of([(1.0, 1), (0.0, 1)]), estimator=broken)
    with pytest.raises(RunError, match=r"one finite number per valid sample"):
        build(group_of([(1.0, 1), (0.0, 1)]), estimator=lambda rewards: rewards[:1])


def test_all_forks_of_an_episode_share_its_advantage_and_its_weight_and_the_episode_counts_once(forked_group):
    group = forked_group()  # 2 + 3 and 1 tokens of the first episode, 2 of the second
    samples = build(group, variation="sample_level", estimator=group_mean)
    assert advantages(samples) == {0: 0.5, 1: 0.5, 2: -0.5}
    assert [sample.arrays["loss_weights"] for sample in samples] == [1 / 6, 1 / 6, 1 / 2]
    assert [sample.token_ids[sample.loss_mask].tolist() for sample in samples] == [
        [10, 11, 12, 13, 14],
        [15],
        [16, 17],
    ]
    assert count_episodes(group, samples) == 2


def test_token_weights_are_of_the_tokens_of_all_turns_and_forks(forked_group):
    group, everything = forked_group(), np.array([True, True])
    for variation, weights in (("sample_level", [1 / 6, 1 / 2]), ("token_level", [1, 1]), ("constant", [1 / 8] * 2)):
        found = token_weights(group, everything, loss_variation=variation, max_length=8)
        assert found.tolist() == weights
    only_second = token_weights(group, ~everything | [False, True], loss_variation="sample_level", max_length=8)
    assert only_second.tolist() == [0.0, 1 / 2]


def test_a_fork_without_a_token_in_the_loss_is_no_sample(forked_group):
    first, fork, other = forked_group().trajectories
    silent = masked(fork, [False] * 7)
    assert [sample.number for sample in build(forked_group((first, silent, other)))] == [0, 2]


def test_contexts_between_turns_and_what_a_fork_shares_are_read_and_not_trained(forked_group):
    first, fork, other = build(forked_group())
    assert first.prefix_ids is fork.prefix_ids is other.prefix_ids, "all begin with the prompt, which is sent once"
    assert (first.prefix_ids.tolist(), first.token_ids.tolist()) == ([1, 2, 3], [10, 11, 20, 21, 12, 13, 14])
    assert first.loss_mask.tolist() == [True, True, False, False, True, True, True]
    assert first.arrays["rollout_logprobs"].tolist() == [-3 / 8, -4 / 8, -7 / 8, -1.0, -9 / 8]
    assert (fork.token_ids.tolist(), fork.loss_mask.tolist()) == ([10, 11, 22, 15], [False, False, False, True])


def test_a_sequence_of_another_context_begins_with_what_it_shares(forked_group):
    own = trajectory([40, 41, 18], (2, 3), episode=1, shared=0, index=1)
    part = trajectory([1, 2, 42, 19], (3, 4), episode=1, shared=2, index=2)
    samples = build(forked_group((*forked_group().trajectories, own, part)))
    assert [sample.prefix_ids.tolist() for sample in samples[3:]] == [[], [1, 2]]
    assert [sample.token_ids.tolist() for sample in samples[3:]] == [[40, 41, 18], [42, 19]]


def test_a_fork_that_leaves_its_parent_inside_the_prompt_begins_with_that_part_of_it_and_so_do_its_own(forked_group):
    first, _, other = forked_group().trajectories
    early = trajectory([1, 2, 42, 18, 19], (3, 5), shared=2, parent=0, index=2)
    late = trajectory([1, 2, 42, 18, 19, 43, 20], (6, 7), shared=5, parent=1, index=3)
    samples = build(forked_group((first, early, late, other)))
    assert [sample.prefix_ids.tolist() for sample in samples] == [[1, 2, 3], [1, 2], [1, 2], [1, 2, 3]]
    assert [sample.token_ids.tolist() for sample in samples[1:3]] == [[42, 18, 19], [42, 18, 19, 43, 20]]
    assert [np.flatnonzero(sample.loss_mask).tolist() for sample in samples[1:3]] == [[1, 2], [4]]


@pytest.mark.parametrize("values", [[0.5, 0.5, 1, 1, 1], [0.5, 0.5, 1, 1, 0.5]])  # the ends may be equal
def test_turns_of_different_temperatures_keep_theirs(forked_group, values):
    first, *others = forked_group().trajectories
    temperature = np.array(values, dtype=np.float32)
    samples = build(forked_group((replace(first, temperature=temperature), *others)))
    assert samples[0].arrays["temperature"].tolist() == values
    assert [sample.arrays["temperature"] for sample in samples[1:]] == [np.float32(0.7)] * 2


def test_gdpo_normalises_each_reward_of_the_tasks_breakdown_by_itself(group_of):
    group = group_of([(0.5, 1), (1.0, 1), (9.0, 1), (-99.0, 1, "invalid")])
    parts = [{"boxed": 0.0, "brief": 1.0}, {"boxed": 1.0, "brief": 0.0}, {"boxed": 1.0, "brief": 1.0, "more": 5.0}, {}]
    scores = tuple(replace(score, breakdown=part) for score, part in zip(group.scores, parts, strict=True))
    group = replace(group, scores=scores)
    found = advantages(build(group, decoupled_weights={"default": {"boxed": 1.0, "brief": 0.5}}))
    # boxed 0, 1, 1 and brief 1, 0, 1: deviation sqrt(1/3), so -2/3, 1/3, 1/3 become -1.1547, 0.57735, 0.57735
    unit = 3**0.5 / 3
    assert found == pytest.approx({0: -2 * unit + 0.5 * unit, 1: unit - unit, 2: 1.5 * unit}, abs=1e-5)
    assert advantages(build(group, decoupled_weights={"other": {"boxed": 1.0}})) == advantages(build(group))
    with pytest.raises(RunError, match=r"gdpo: a response to prompt .* has no reward 'judge'"):
        build(group, decoupled_weights={"default": {"boxed": 1.0, "judge": 0.5}})


def test_rewards_are_scaled_before_the_length_penalty_is_added(group_of):
    group = group_of([(4.0, 8), (0.0, 1)])
    rules = GroupRules(max_new_tokens=8, over_length_cache=4)
    samples = build_samples(
        group, rules=rules, loss_variation="token_level", estimator=group_mean, scaling=RewardScaling(clip=(0.0, 1.0))
    )
    assert advantages(samples) == {0: 0.0, 1: 0.0}, "1 - 1 and 0"


def test_turns_have_advantages_of_the_rewards_that_follow_them(forked_group):
    # Episode 0 was rewarded 0.5 in its first turn, and 1 in all, so 0.5 at its third, which is a fork; episode 1 has 0.
    group = forked_group()
    first, fork, other = build(group, estimator=group_mean, turn_discount=0.5)
    assert first.arrays["advantages"].tolist() == [0.3125, 0.3125, 0.0, 0.0, 0.0], "(0.5 + 0.5 * 0.5 * 0.5) / 2"
    assert (fork.arrays["advantages"], other.arrays["advantages"]) == (0.0, -0.3125), "only episode 0 has more turns"


def test_all_turns_have_the_episodes_advantage_if_only_the_end_is_rewarded_and_nothing_discounted(forked_group):
    one, two = (trajectory([1, 2, 3, 10, 11, 20, 12], (3, 5), (6, 7), episode=episode) for episode in (0, 1))
    group = forked_group((one, two))
    by_turn, by_episode = build(group, turn_discount=1.0), build(group)
    assert [sample.arrays["advantages"] for sample in by_turn] == [
        np.float32(sample.arrays["advantages"]) for sample in by_episode
    ]
