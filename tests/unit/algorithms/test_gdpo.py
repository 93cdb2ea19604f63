"""Test GDPO: each reward normalised by itself, against the paper's formula in NumPy and TRL's own computation."""

import inspect
import textwrap
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati_rl.algorithms.advantage import decoupled_advantages
from coati_rl.algorithms.token_advantages import advantage_sums, whiten
from tests.examples import examples
from tests.unit.algorithms import oracle
from tests.unit.algorithms.batches import lay_out, numbers, random_samples, to_micro_batch
from tests.unit.algorithms.importing_trl import importing_trl

ALL = np.ones(4, dtype=bool)


def test_two_binary_rewards_are_told_apart_where_their_sum_is_not():
    # Sums 0, 1, 1, 2 would give the second and the third sample the same advantage.
    rewards = np.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]])
    found = decoupled_advantages(rewards, ALL, weights=[1.0, 0.5])
    unit = 0.5 / (np.sqrt(1 / 3) + 1e-6)  # mean 1/2, deviation sqrt(4 * 1/4 / 3)
    assert found == pytest.approx([-1.5 * unit, -0.5 * unit, 0.5 * unit, 1.5 * unit], rel=1e-12)


def test_a_reward_that_all_samples_share_adds_exactly_nothing_and_invalid_samples_have_none():
    rewards = np.array([[0.7, 1.0], [0.7, 0.0], [9.0, 9.0], [0.7, 0.0]])
    found = decoupled_advantages(rewards, np.array([True, True, False, True]), weights=[3.0, 1.0])
    alone = decoupled_advantages(rewards[[0, 1, 3]], ALL[:3], weights=[0.0, 1.0])
    assert found.tolist() == [alone[0], alone[1], 0.0, alone[2]]


def test_rewards_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"must have shape \[G, K\]"):
        decoupled_advantages(np.zeros((4, 2)), ALL, weights=[1.0])


@examples(120)
@given(
    rewards=st.lists(st.tuples(*[st.sampled_from([0.0, 0.25, 1.0, -3.0])] * 3), min_size=2, max_size=8),
    weights=st.tuples(*[st.floats(-2, 2)] * 3),
)
def test_any_group_is_the_papers_formula(rewards, weights):
    found = decoupled_advantages(np.array(rewards), np.ones(len(rewards), dtype=bool), weights=weights)
    np.testing.assert_allclose(found, oracle.gdpo(rewards, weights), rtol=1e-6, atol=1e-6)


@pytest.mark.full
@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")
@pytest.mark.parametrize("seed", range(3))
def test_with_whitening_it_is_trls_normalize_then_sum_up_to_its_constants(seed):
    """TRL adds 1e-4 to deviations and takes the unbiased one of the batch; with equal lengths tokens are samples."""
    rng, groups, size = np.random.default_rng(seed), 4, 8
    rewards, weights = rng.normal(size=(groups, size, 3)), [1.0, 0.5, -0.25]
    ours = np.concatenate(
        [decoupled_advantages(group, np.ones(size, dtype=bool), weights=weights) for group in rewards]
    )
    whitened = whitened_samples(ours)
    count = groups * size
    expected = trls_advantages(rewards.reshape(count, 3), weights, size)
    np.testing.assert_allclose(whitened, expected * np.sqrt(count / (count - 1)), atol=1e-3)
    exact = trls_advantages(rewards.reshape(count, 3), weights, size, eps="0.0")
    np.testing.assert_allclose(whitened, exact * np.sqrt(count / (count - 1)), rtol=1e-5, atol=1e-5)


def whitened_samples(advantages):
    """Whiten the tokens of samples of two tokens each, and return each sample's value."""
    samples = random_samples([2] * len(advantages))
    samples = [replace(each, advantages=np.full(2, value)) for each, value in zip(samples, advantages, strict=True)]
    batch = lay_out(samples, seed=0)
    micro_batch = to_micro_batch(batch)
    done = whiten(micro_batch, numbers(advantage_sums([micro_batch]))).loss_arrays["advantages"]
    return np.array([done[place][0] for place in batch.places])


def trls_advantages(rewards, weights, group_size, *, eps="1e-4"):
    """Run TRL's own lines of the branch normalize_then_sum, with its eps or another."""
    with importing_trl():
        from trl.trainer import grpo_trainer

    source = inspect.getsource(grpo_trainer.GRPOTrainer)
    branch = source.partition('self.multi_objective_aggregation == "normalize_then_sum":\n')[2]
    lines = textwrap.dedent(branch.partition("        else:\n")[0]).replace("1e-4", eps)
    assert "nanstd(grouped" in lines and "advantages =" in lines
    names = {
        "torch": torch,
        "nanstd": grpo_trainer.nanstd,
        "self": SimpleNamespace(reward_funcs=weights, reward_weights=torch.tensor(weights, dtype=torch.float64)),
        "rewards_per_func": torch.tensor(rewards),
        "num_generations": group_size,
        "device": "cpu",
        # No completion is without any reward.
        "unscorable_mask": torch.zeros(len(rewards), dtype=torch.bool),
    }
    exec(lines, names)
    return names["advantages"].numpy()
