"""A scored group -> samples: advantages over the valid ones, weights, and what stands on prompt tokens."""

import numpy as np
import pytest

from coati_rl.data.sample_builder import build_samples, is_trainable


def test_prompt_tokens_are_in_the_sample_and_outside_of_the_loss(group_of):
    group = group_of([(1.0, 2), (0.0, 3)])  # (reward, response tokens); the prompt is three tokens: 1, 2, 3
    first, second = build_samples(group, loss_variation="sample_level")
    assert first.token_ids.tolist() == [1, 2, 3, 10, 11]
    assert first.loss_mask.tolist() == [False, False, False, True, True]
    assert first.rollout_logprobs.tolist() == [0, 0, 0, -0.5, -0.5]
    assert first.policy_version.tolist() == [-1, -1, -1, 7, 7]
    np.testing.assert_allclose(first.temperature, [1, 1, 1, 0.7, 0.7], rtol=1e-6)
    assert second.token_ids.tolist() == [1, 2, 3, 10, 11, 12]


def test_advantages_are_standardised_with_the_unbiased_deviation(group_of):
    samples = build_samples(group_of([(1.0, 1), (0.0, 1)]), loss_variation="sample_level")
    # mean 0.5, deviation sqrt((0.25 + 0.25) / (2 - 1)) = 0.7071: +-0.5 / 0.7071
    assert [sample.advantages[-1] for sample in samples] == pytest.approx([0.70711, -0.70711], abs=1e-5)
    assert [sample.advantages[0] for sample in samples] == [0, 0]


def test_each_sample_weighs_one_at_sample_level_and_each_token_one_at_token_level(group_of):
    group = group_of([(1.0, 2), (0.0, 4)])
    by_sample = build_samples(group, loss_variation="sample_level")
    by_token = build_samples(group, loss_variation="token_level")
    assert [sample.loss_weights[3:].tolist() for sample in by_sample] == [[0.5] * 2, [0.25] * 4]
    assert [sample.loss_weights[3:].tolist() for sample in by_token] == [[1.0] * 2, [1.0] * 4]
    assert [sample.loss_weights[:3].tolist() for sample in by_token] == [[0.0] * 3] * 2


def test_a_sample_that_nobody_could_score_is_left_out_of_group_statistics_and_loss(group_of):
    with_invalid = group_of([(1.0, 1), (0.0, 1), (-99.0, 1, "invalid")])
    without = group_of([(1.0, 1), (0.0, 1)])
    assert is_trainable(with_invalid).tolist() == [True, True, False]
    assert [sample.advantages.tolist() for sample in build_samples(with_invalid, loss_variation="token_level")] == [
        sample.advantages.tolist() for sample in build_samples(without, loss_variation="token_level")
    ]


def test_a_response_without_tokens_is_not_trained(group_of):
    assert is_trainable(group_of([(1.0, 0), (0.0, 1)])).tolist() == [False, True]


def test_equal_rewards_give_no_advantage(group_of):
    samples = build_samples(group_of([(0.7, 1)] * 7), loss_variation="token_level")
    assert [sample.advantages[-1] for sample in samples] == [0.0] * 7
