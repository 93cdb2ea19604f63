"""Test that rewards are normalised over a mini-batch and clipped: literal values, worked by hand."""

import math

import numpy as np
import pytest

from coati_rl.algorithms.reward_scaling import RewardScaling, fit_scaling


def arrays(*groups):
    return [np.array(group, dtype=np.float64) for group in groups]


def test_without_either_the_very_same_array_is_used():
    rewards = np.array([0.1, 0.7])
    assert RewardScaling()(rewards) is rewards
    assert fit_scaling([rewards], is_normalized=False, clip=None) == RewardScaling()


def test_rewards_are_clipped():
    scaling = fit_scaling(arrays([5.0]), is_normalized=False, clip=(-1.0, 2.0))
    assert scaling(np.array([-3.0, 0.5, 7.0])).tolist() == [-1.0, 0.5, 2.0]


def test_mean_and_deviation_are_of_all_groups_of_the_mini_batch():
    # 1, 3, 5, 7: mean 4, deviation sqrt((9 + 1 + 1 + 9) / 3) = sqrt(20 / 3)
    scaling = fit_scaling(arrays([1, 3], [5, 7]), is_normalized=True, clip=None)
    assert scaling(np.array([1.0, 7.0])) == pytest.approx(np.array([-3, 3]) / (math.sqrt(20 / 3) + 1e-6), rel=1e-12)


def test_rewards_whose_mean_or_deviation_is_that_of_normalised_ones_already_are_normalised_too():
    centred = fit_scaling(arrays([-4, 4]), is_normalized=True, clip=None)  # mean 0, deviation sqrt(32)
    assert centred(np.array([-4.0, 4.0])) == pytest.approx(np.array([-4, 4]) / (math.sqrt(32) + 1e-6), rel=1e-12)
    equal = fit_scaling(arrays([3.0, 3.0]), is_normalized=True, clip=None)  # deviation 1 stands for none
    assert (equal.mean, equal.std) == (3.0, 1.0)
    assert equal(np.array([3.0])).tolist() == [0.0]


def test_the_normalised_rewards_are_clipped():
    scaling = fit_scaling(arrays([1, 3], [5, 7]), is_normalized=True, clip=(-1.0, 0.5))
    assert scaling(np.array([1.0, 4.0, 7.0])) == pytest.approx([-1.0, 0.0, 0.5], abs=1e-12)


@pytest.mark.parametrize("groups", [[[0.7] * 7], [[0.7]], [[0.7], [0.7]]])
def test_equal_rewards_and_a_single_one_become_exactly_0(groups):
    scaling = fit_scaling(arrays(*groups), is_normalized=True, clip=None)
    assert scaling(np.array([0.7])).tolist() == [0.0]


def test_without_a_valid_sample_nothing_is_scaled():
    assert fit_scaling(arrays([], []), is_normalized=True, clip=None) == RewardScaling()
