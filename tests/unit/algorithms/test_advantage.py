"""Group advantages: literal groups, each checked by hand."""

import math

import numpy as np
import pytest

from coati_rl.algorithms.advantage import grpo_advantages


def all_valid(rewards: list[float]) -> np.ndarray:
    return grpo_advantages(np.array(rewards), np.ones(len(rewards), dtype=bool), eps=0.0)


def test_rewards_are_standardised_with_the_unbiased_deviation() -> None:
    # mean 0.5, squared distances 4 * 0.25 = 1, / (4 - 1), root 1/sqrt(3): A = +-0.5 * sqrt(3)
    np.testing.assert_allclose(all_valid([1, 0, 1, 0]), math.sqrt(3) / 2 * np.array([1, -1, 1, -1]), rtol=1e-15)


def test_eps_is_added_to_the_deviation() -> None:
    # mean 1, deviation sqrt(((2-1)^2 + (0-1)^2) / 1) = sqrt(2)
    advantages = grpo_advantages(np.array([2.0, 0.0]), np.array([True, True]), eps=0.5)
    np.testing.assert_allclose(advantages, np.array([1, -1]) / (math.sqrt(2) + 0.5), rtol=1e-15)


def test_equal_rewards_have_no_advantage_even_where_their_mean_is_not_exact() -> None:
    assert all_valid([0.7] * 7).tolist() == [0.0] * 7


def test_rewards_given_in_float32_are_standardised_in_float64() -> None:
    advantages = grpo_advantages(np.full(7, 0.7, dtype=np.float32), np.ones(7, dtype=bool))
    assert advantages.dtype == np.float64
    assert advantages.tolist() == [0.0] * 7


def test_an_invalid_sample_gets_nothing_and_is_left_out_of_the_statistics() -> None:
    rewards, valid = np.array([1.0, 1e6, 0.0, np.nan]), np.array([True, False, True, False])
    advantages = grpo_advantages(rewards, valid, eps=0.0)
    # two valid samples: mean 0.5, deviation sqrt(0.5), so +-0.5 / sqrt(0.5)
    np.testing.assert_allclose(advantages, [math.sqrt(0.5), 0, -math.sqrt(0.5), 0], rtol=1e-15)


@pytest.mark.parametrize("valid", [[False, False], [True, False]])
def test_fewer_than_two_valid_samples_say_nothing(valid: list[bool]) -> None:
    assert grpo_advantages(np.array([1.0, 0.0]), np.array(valid)).tolist() == [0.0, 0.0]


def test_a_group_of_one_gives_zero_and_not_nan() -> None:
    assert all_valid([1.0]).tolist() == [0.0]


def test_shapes_eps_and_valid_rewards_are_checked() -> None:
    with pytest.raises(ValueError, match=r"shape \[G\]"):
        grpo_advantages(np.zeros(3), np.ones(2, dtype=bool))
    with pytest.raises(ValueError, match="eps = -1"):
        grpo_advantages(np.zeros(2), np.ones(2, dtype=bool), eps=-1)
    with pytest.raises(ValueError, match="finite"):
        grpo_advantages(np.array([np.nan, 1.0]), np.ones(2, dtype=bool))
