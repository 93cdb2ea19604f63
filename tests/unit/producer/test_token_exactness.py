"""Test with random episodes that what is trained is what the engine sampled: tokens, log-probabilities, versions.

Of templates, tools, answers, ends of turns, observations, clients that send the conversation back, and forks.
"""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.producer.chat_families import FAMILIES
from tests.unit.producer.random_episodes import ANSWERS, ENDS, MOVES, check_trajectories, play

TURN = st.tuples(st.sampled_from(ANSWERS), st.sampled_from(ENDS), st.sampled_from(MOVES))
EPISODE = {
    "family": st.sampled_from(sorted(FAMILIES)),
    "turns": st.lists(TURN, min_size=1, max_size=6),
    "with_tools": st.booleans(),
    "seed": st.integers(0, 2**32),
}
NO_LIMITS = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def check(family, turns, with_tools, seed):
    played = play(family, turns, with_tools=with_tools, seed=seed)
    check_trajectories(played.log, played.tree.trajectories(), played.prompt)
    return played


@settings(max_examples=100, **NO_LIMITS)
@given(**EPISODE)
def test_every_sampled_token_is_trained_once_as_the_engine_gave_it_and_no_other_is(family, turns, with_tools, seed):
    assert len(check(family, turns, with_tools, seed).log) > 0


@pytest.mark.full
@settings(max_examples=1000, **NO_LIMITS)
@given(**EPISODE)
def test_a_thousand_episodes_are_exact(family, turns, with_tools, seed):
    assert len(check(family, turns, with_tools, seed).log) > 0
