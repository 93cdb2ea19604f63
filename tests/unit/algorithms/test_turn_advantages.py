"""Test the advantages of turns against their formula in plain Python."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.algorithms.advantage import STD_EPS, group_advantages, group_mean, group_norm
from coati_rl.algorithms.turn_advantages import turn_advantages

NONE = math.nan


def oracle(rewards, discount):
    """group_norm of the returns to go of each turn, over the episodes that have it."""
    returns = []
    for row in rewards:
        turns = [reward for reward in row if not math.isnan(reward)]
        returns.append([sum(r * discount**k for k, r in enumerate(turns[j:])) for j in range(len(turns))])
    found = [[0.0] * len(rewards[0]) for _ in rewards]
    for turn in range(len(rewards[0])):
        having = [i for i, row in enumerate(returns) if len(row) > turn]
        values = [returns[i][turn] for i in having]
        if len(values) > 1 and len(set(values)) > 1:
            for i, value in zip(having, values, strict=True):
                deviation = statistics.stdev(values) + STD_EPS
                found[i][turn] = (value - statistics.fmean(values)) / deviation
    return found


def test_a_turn_is_compared_with_the_same_turn_of_the_other_episodes():
    rewards = np.array([[0.0, 1.0, NONE], [0.5, 0.0, 2.0], [0.0, NONE, NONE]])
    # Returns with 0.5: 0.5, 1 | 0.5 + 0.5 * (0 + 0.5 * 2) = 1, 1, 2 | 0.
    found = turn_advantages(rewards, discount=0.5, estimator=group_mean)
    assert found == pytest.approx(np.array([[0.0, 0.0, 0.0], [0.5, 0.0, 0.0], [-0.5, 0.0, 0.0]]))


def test_an_episode_that_is_not_valid_has_no_part_in_any_turn():
    rewards = np.array([[0.0, 1.0], [NONE, NONE], [1.0, 3.0]])
    found = turn_advantages(rewards, discount=1.0, estimator=group_norm)
    assert found[1].tolist() == [0.0, 0.0]
    assert found[[0, 2]] == pytest.approx(turn_advantages(rewards[[0, 2]], discount=1.0, estimator=group_norm))


def test_one_turn_is_what_an_episode_has():
    rewards = np.array([0.0, 1.0, 1.0, 0.25])
    expected = group_advantages(rewards, np.ones(4, dtype=bool), estimator=group_norm)
    assert turn_advantages(rewards[:, None], discount=0.9, estimator=group_norm)[:, 0].tolist() == expected.tolist()


@given(
    st.lists(st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=4), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_group_has_the_advantages_of_the_formula(episodes, discount):
    width = max(map(len, episodes))
    rewards = [[*row, *[NONE] * (width - len(row))] for row in episodes]
    found = turn_advantages(np.array(rewards), discount=discount, estimator=group_norm)
    assert found == pytest.approx(np.array(oracle(rewards, discount)), abs=1e-9)
