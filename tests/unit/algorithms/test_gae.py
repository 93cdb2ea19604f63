"""Test advantages and returns by GAE against the sums of its definition, and against other systems' loops."""

import itertools

import numpy as np
import pytest
import torch

from coati_rl.algorithms.gae import TokenReturns, generalised_advantages
from coati_rl.batch import MicroBatch

CASES = [*itertools.product((1, 2, 7), (1.0, 0.9), (1.0, 0.95, 0.0), (False, True))]


def numbers(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=count), rng.normal(size=count)


def by_definition(rewards, values, discount, trace, is_cut):
    """Equation 16 of arXiv:1506.02438, as a double sum."""
    after = [*values[1:], values[-1] if is_cut else 0.0]
    deltas = [r + discount * v_next - v for r, v_next, v in zip(rewards, after, values, strict=True)]
    count = len(deltas)
    return [sum((discount * trace) ** (s - t) * deltas[s] for s in range(t, count)) for t in range(count)]


def masked_loop(rewards, values, mask, discount, trace):
    """The loop of verl's compute_gae_advantage_return: what is not in the mask hands value and sum on."""
    next_value = last = 0.0
    advantages = np.zeros(len(rewards))
    for t in reversed(range(len(rewards))):
        delta = rewards[t] + discount * next_value - values[t]
        found = delta + discount * trace * last
        next_value = values[t] * mask[t] + (1 - mask[t]) * next_value
        last = found * mask[t] + (1 - mask[t]) * last
        advantages[t] = last
    return advantages * mask


def micro_batch(mask, index, **arrays) -> MicroBatch:
    mask = np.array(mask, dtype=bool)
    shape = mask.shape
    filled = {name: np.broadcast_to(np.asarray(array, dtype=np.float32), shape) for name, array in arrays.items()}
    return MicroBatch(
        token_ids=np.zeros(shape, dtype=np.int64),
        position_ids=np.zeros(shape, dtype=np.int64),
        segments=np.zeros((0, 4), dtype=np.int32),
        loss_arrays={
            "token_ids": np.zeros(shape, dtype=np.int64),
            "sources": np.zeros(shape, dtype=np.int64),
            "loss_mask": mask,
            "sample_index": np.array(index, dtype=np.int32),
            "advantages": np.zeros(shape, dtype=np.float32),
            "rollout_logprobs": np.zeros(shape, dtype=np.float32),
            "is_cut": np.zeros(shape, dtype=np.float32),
            **filled,
        },
    )


@pytest.mark.parametrize(("count", "discount", "trace", "is_cut"), CASES)
def test_advantages_are_the_double_sum_of_the_definition(count, discount, trace, is_cut) -> None:
    rewards, values = numbers(count)
    found = generalised_advantages(rewards, values, discount=discount, trace=trace, is_cut=is_cut)
    assert found == pytest.approx(by_definition(rewards, values, discount, trace, is_cut), abs=1e-12)


def test_with_lambda_1_they_are_the_rewards_to_go_less_the_value() -> None:
    rewards, values = numbers(5)
    found = generalised_advantages(rewards, values, discount=1.0, trace=1.0)
    assert found == pytest.approx(rewards[::-1].cumsum()[::-1] - values, abs=1e-12)


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.9, 0.5)])
def test_tokens_outside_the_loss_are_no_steps(discount, trace) -> None:
    rewards, values = numbers(9)
    mask = np.array([1, 1, 0, 0, 1, 1, 0, 1, 1])
    rewards = rewards * mask  # where others give a reward at a token of a tool they lose it
    right = masked_loop(rewards.astype(np.float32), values.astype(np.float32), mask, discount, trace)
    batch = micro_batch([mask], [[3] * 9], token_rewards=[rewards], old_values=[values])
    done, _ = TokenReturns(discount=discount, trace=trace)(batch)
    assert done.loss_arrays["advantages"][0] == pytest.approx(right, abs=1e-6)
    returns = np.where(mask, right + values, 0.0)
    assert done.loss_arrays["returns"][0] == pytest.approx(returns, abs=1e-6)


def test_samples_of_a_row_are_apart_and_padding_is_0() -> None:
    rewards, values = numbers(6)
    batch = micro_batch(
        [[1, 1, 1, 1, 1, 0]],
        [[0, 0, 1, 2, 2, -1]],
        token_rewards=[rewards],
        old_values=[values],
        is_cut=[[0, 0, 0, 1, 1, 0]],
    )
    done, _ = TokenReturns(trace=0.9)(batch)
    found = done.loss_arrays["advantages"][0]
    for part, is_cut in ((slice(0, 2), False), (slice(2, 3), False), (slice(3, 5), True)):
        single = numbers_of(rewards[part], values[part], is_cut)
        assert found[part] == pytest.approx(single, abs=1e-6)
    assert (found[5], done.loss_arrays["returns"][0, 5]) == (0.0, 0.0)


def test_the_value_that_stands_in_for_the_state_after_a_cut_does_not_run_after_itself() -> None:
    value = 0.5
    for _ in range(5):  # of an answer of one token, which is punished and cut each time
        batch = micro_batch([[1]], [[0]], token_rewards=[[-1.0]], old_values=[[value]], is_cut=[[1]])
        arrays = TokenReturns()(batch)[0].loss_arrays
        assert arrays["advantages"][0, 0] == -1.0  # the policy is punished for it
        value = float(arrays["returns"][0, 0])  # as a critic that has learned it
    assert value == 0.5


def numbers_of(rewards, values, is_cut):
    rewards, values = (each.astype(np.float32).astype(np.float64) for each in (rewards, values))
    return by_definition(rewards, values, 1.0, 0.9, is_cut)


def test_kl_is_part_of_each_token_s_reward_and_so_of_the_returns() -> None:
    rewards, values = numbers(4)
    kl = np.array([0.1, 0.0, -0.2, 0.4])
    batch = micro_batch(
        [[1] * 4], [[0] * 4], token_rewards=[rewards], old_values=[values], rollout_logprobs=[kl], ref_logprobs=0.0
    )
    done, sums = TokenReturns(kl_coeff=0.5, kl_estimator="k1")(batch)
    alone = micro_batch([[1] * 4], [[0] * 4], token_rewards=[rewards - 0.5 * kl], old_values=[values])
    right, _ = TokenReturns()(alone)
    for name in ("advantages", "returns"):
        assert done.loss_arrays[name] == pytest.approx(right.loss_arrays[name], abs=1e-6)
    assert float(sums["kl_sum"]) == pytest.approx(kl.sum(), abs=1e-6)


def test_the_critic_has_a_lambda_of_its_own_and_that_of_advantages_follows_the_length() -> None:
    rewards, values = numbers(8)
    batch = micro_batch([[1] * 8], [[0] * 8], token_rewards=[rewards], old_values=[values])
    done, _ = TokenReturns(critic_trace=1.0, trace_by_length=0.5)(batch)
    rewards, values = (batch.loss_arrays[name][0].astype(np.float64) for name in ("token_rewards", "old_values"))
    right = by_definition(rewards, values, 1.0, 1 - 1 / (0.5 * 8), False)
    assert done.loss_arrays["advantages"][0] == pytest.approx(right, abs=1e-6)
    assert done.loss_arrays["returns"][0] == pytest.approx(rewards[::-1].cumsum()[::-1], abs=1e-6)
    assert TokenReturns(trace_by_length=0.5).trace_of(1) == 0.0


def test_what_is_reported_is_float64() -> None:
    batch = micro_batch([[1]], [[0]], token_rewards=1.0, old_values=0.0, ref_logprobs=0.0)
    _, sums = TokenReturns(kl_coeff=1.0)(batch)
    assert sums["kl_sum"].dtype == torch.float64
