"""Test to which turn a reward at a token belongs, and which tokens have a turn's value."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from coati_rl.batching.packed_group import as_packed
from coati_rl.batching.turn_rewards import turn_rewards, values_by_token
from coati_rl.types import TokenReward, Trajectory
from tests.unit.batching.trajectories import masked, trajectory

NAN = math.nan
# A prompt of three tokens; answers at 3-4, 7-8 and 11, each two tokens of context apart.
TURNS = ((3, 5), (7, 9), (11, 12))
TOKENS = [1, 2, 3, 10, 11, 20, 21, 12, 13, 22, 23, 14]


def rewarded(*pairs: tuple[int, float], episode: int = 0) -> Trajectory:
    """An episode of three turns with these rewards, each (place, value)."""
    rewards = tuple(TokenReward(position=place, name="env", value=value) for place, value in pairs)
    return trajectory(TOKENS, *TURNS, episode=episode, rewards=rewards)


def one_turn(*, episode: int) -> Trajectory:
    return trajectory([1, 2, 3, 16], (3, 4), episode=episode)


def by_turn(group: Any, totals: Sequence[float], valid: Sequence[bool] = (True, True)) -> list[list[float]]:
    return turn_rewards(group, np.array(totals), np.array(valid)).tolist()


@pytest.mark.parametrize(
    ("place", "turn"),
    [
        (3, 0),
        (4, 0),
        (6, 0),  # between two answers: of the one before
        (7, 1),
        (8, 1),
        (10, 1),
        (11, 2),
        (2, 0),  # before the first answer
    ],
)
def test_a_reward_is_that_of_the_turn_it_is_in_or_of_the_last_one_before_it(
    forked_group: Any, place: int, turn: int
) -> None:
    found, other = by_turn(forked_group((rewarded((place, 0.25)), one_turn(episode=1))), [1.0, 0.5])
    expected = [0.0, 0.0, 0.75]
    expected[turn] += 0.25
    assert found == expected
    np.testing.assert_array_equal(other, [0.5, NAN, NAN])


def test_rewards_of_one_turn_add_up_and_all_are_a_part_of_the_total(forked_group: Any) -> None:
    group = forked_group((rewarded((4, 0.25), (4, 0.5), (8, -1.0)), one_turn(episode=1)))
    assert by_turn(group, [1.0, 0.0])[0] == [0.75, -1.0, 1.25]


def test_the_last_turn_is_that_of_the_whole_episode_also_if_a_fork_of_an_earlier_turn_comes_last(
    forked_group: Any,
) -> None:
    early = trajectory([1, 2, 3, 30, 31], (4, 5), shared=3, parent=0, index=1)  # the second answer, in its own context
    whole = trajectory(TOKENS[:9], (3, 5), (7, 9))
    later = trajectory([1, 2, 3, 10, 11, 40, 41, 42], (7, 8), shared=5, parent=0, index=2)
    group = forked_group((whole, later, early, one_turn(episode=1)))
    assert by_turn(group, [1.0, 0.0])[0] == [0.0, 0.0, 1.0]


def test_an_episode_that_is_not_valid_has_no_rewards_not_even_those_of_its_turns(forked_group: Any) -> None:
    found = by_turn(forked_group((rewarded((4, 0.5)), one_turn(episode=1))), [NAN, 1.0], [False, True])
    np.testing.assert_array_equal(found, [[NAN] * 3, [1.0, NAN, NAN]])


def test_the_tokens_of_a_turn_that_are_in_the_loss_have_its_value(forked_group: Any) -> None:
    whole = rewarded()
    mask = whole.loss_mask.copy()
    mask[8] = False  # a token of the second answer
    group = forked_group((masked(whole, mask), one_turn(episode=1)))
    described = as_packed(group).trajectories[0]
    found = values_by_token(described, mask[3:], np.array([0.5, -1.0, 2.0]))
    assert found.tolist() == [0.5, 0.5, -1.0, 2.0]
