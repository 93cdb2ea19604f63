"""Test which token a reward is at, where a critic learns from the rewards of tokens."""

from typing import Any

import numpy as np
import pytest

from coati_rl.algorithms.advantage import reward
from coati_rl.algorithms.gae import TokenReturns
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packing import pack
from coati_rl.batching.sample_builder import build_samples
from coati_rl.batching.turn_rewards import token_rewards
from coati_rl.types import TokenReward
from tests.unit.batching.test_turn_rewards import TOKENS, TURNS, one_turn, rewarded
from tests.unit.batching.trajectories import trajectory


def by_token(group: Any, *totals: float) -> list[list[float]]:
    return [each.tolist() for each in token_rewards(group, np.array(totals))]


@pytest.mark.parametrize(
    ("place", "at"),
    [(3, 1), (4, 1), (6, 1), (7, 3), (8, 3), (10, 3), (11, 4), (2, 1)],  # of five loss tokens
)
def test_a_turn_s_reward_is_at_its_last_token_and_the_rest_at_the_end(forked_group: Any, place: int, at: int) -> None:
    first, second = by_token(forked_group((rewarded((place, 0.25)), one_turn(episode=1))), 1.0, 0.5)
    expected = [0.0, 0.0, 0.0, 0.0, 0.75]
    expected[at] += 0.25
    assert (first, second) == (expected, [0.5])


def test_the_sum_over_tokens_is_the_episode_s_reward(forked_group: Any) -> None:
    group = forked_group((rewarded((4, 0.25), (4, 0.5), (8, -1.0)), one_turn(episode=1)))
    assert by_token(group, 1.0, 0.0)[0] == [0.0, 0.75, 0.0, -1.0, 1.25]


def test_each_fork_of_an_episode_ends_with_what_is_of_no_turn(forked_group: Any) -> None:
    tool = TokenReward(position=4, name="tool", value=0.5)
    whole = trajectory(TOKENS, *TURNS, rewards=(tool,))
    fork = trajectory([1, 2, 3, 10, 11, 22, 15], (6, 7), shared=5, parent=0, index=3)
    assert by_token(forked_group((whole, fork, one_turn(episode=1))), 1.0, 0.0) == [[0, 0.5, 0, 0, 0.5], [0.5], [0.0]]


@pytest.mark.parametrize("shares_prefixes", [False, True])
def test_samples_carry_them_into_the_micro_batch(forked_group: Any, shares_prefixes: bool) -> None:
    rules = GroupRules(max_new_tokens=8, has_token_rewards=True)
    samples = build_samples(forked_group(), rules=rules, loss_variation="token_level", estimator=reward)
    ((micro_batch,),) = pack(samples, max_samples=8, shares_prefixes=shares_prefixes)
    arrays = micro_batch.loss_arrays
    for number, sample in enumerate(samples):
        its = (arrays["sample_index"] == number) & arrays["loss_mask"]
        rewards = np.broadcast_to(np.float32(sample.arrays["token_rewards"]), its.sum())
        assert arrays["token_rewards"][its].tolist() == rewards.tolist()
        assert set(arrays["is_cut"][its]) == {sample.arrays["is_cut"]}
    assert [sample.arrays["is_cut"] for sample in samples] == [0.0, 1.0, 0.0]  # a limit cut the fork
    assert not arrays["token_rewards"][~arrays["loss_mask"]].any()


def test_a_rank_without_a_sample_has_the_arrays_that_a_critic_s_targets_read(group_of: Any) -> None:
    rules = GroupRules(max_new_tokens=8, has_token_rewards=True)
    group = group_of([(1.0, 2), (0.0, 3, "invalid")])  # one of two samples is not in the loss
    samples = build_samples(group, rules=rules, loss_variation="token_level", estimator=reward)
    (full,), (blank,) = pack(samples, num_ranks=2, max_samples=1)
    dtypes = {name: array.dtype for name, array in blank.loss_arrays.items()}
    assert {name: array.dtype for name, array in full.loss_arrays.items()}.items() <= dtypes.items()
    done, _ = TokenReturns(trace=1.0)(blank.with_arrays(old_values=np.ones((1, 1), np.float32)))
    assert (done.loss_arrays["advantages"].tolist(), done.loss_arrays["returns"].tolist()) == ([[0.0]], [[0.0]])


def test_without_a_critic_samples_have_no_such_arrays(forked_group: Any) -> None:
    samples = build_samples(
        forked_group(), rules=GroupRules(max_new_tokens=8), loss_variation="token_level", estimator=reward
    )
    assert not {"token_rewards", "is_cut"} & {*samples[0].arrays}


def test_scaled_rewards_and_length_penalties_are_in_them(group_of: Any) -> None:
    rules = GroupRules(max_new_tokens=4, over_length_cache=4, has_token_rewards=True)
    samples = build_samples(group_of([(1.0, 2), (1.0, 4)]), rules=rules, loss_variation="token_level", estimator=reward)
    totals = [float(np.sum(np.broadcast_to(each.arrays["token_rewards"], each.num_loss_tokens))) for each in samples]
    assert totals == pytest.approx([each.arrays["advantages"] for each in samples])
    assert totals[1] < totals[0] < 1.0
