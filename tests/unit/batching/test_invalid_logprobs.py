"""Test episodes in which the engine's log-probability of a token is no number: not trained, counted, never a NaN."""

import math
from dataclasses import replace

import pytest

from coati_rl.algorithms.advantage import group_norm
from coati_rl.batching.group_rules import GroupRules, is_valid
from coati_rl.batching.sample_builder import build_samples
from coati_rl.types import RolloutGroup
from tests.unit.batching.trajectories import FORKED

RULES = GroupRules(max_new_tokens=8)
NO_NUMBERS = (-math.inf, math.inf, math.nan)


def with_logprob(group: RolloutGroup, trajectory: int, value: float) -> RolloutGroup:
    """The group with this log-probability of the last token of a trajectory."""
    each = [*group.trajectories]
    logprobs = each[trajectory].logprobs.copy()
    logprobs[-1] = value
    each[trajectory] = replace(each[trajectory], logprobs=logprobs)
    return replace(group, trajectories=tuple(each))


def samples_of(group: RolloutGroup):
    return build_samples(group, rules=RULES, loss_variation="sample_level", estimator=group_norm)


@pytest.mark.parametrize("value", NO_NUMBERS)
def test_its_sample_is_invalid_and_the_others_are_trained_as_without_it(group_of, value):
    group = with_logprob(group_of([(1.0, 2), (0.0, 3), (0.5, 4)]), 1, value)
    assert is_valid(group).tolist() == [True, False, True]
    found = samples_of(group)
    expected = samples_of(group_of([(1.0, 2), (9.0, 3, "invalid"), (0.5, 4)]))
    assert [sample.number for sample in found] == [sample.number for sample in expected] == [0, 2]
    assert [sample.arrays["advantages"] for sample in found] == [sample.arrays["advantages"] for sample in expected]


@pytest.mark.parametrize("trajectory", [0, 1])
def test_an_episode_is_so_as_a_whole_also_if_the_token_is_of_one_of_its_forks(forked_group, trajectory):
    assert is_valid(forked_group()).tolist() == [True, True]
    assert is_valid(with_logprob(forked_group(FORKED), trajectory, -math.inf)).tolist() == [False, True]
