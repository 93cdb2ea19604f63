"""Test what of the loss is of a trajectory where an episode has forks: each is a sequence with its own likelihood.

Rewards, advantages, weights and denominators are of episodes (`test_sample_builder`).
"""

from typing import Any

import numpy as np
import pytest
import torch

from coati_rl.algorithms.advantage import group_norm
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.algorithms.off_policy import correction_weights
from coati_rl.algorithms.token_advantages import subtract_kl_to_go
from coati_rl.batch import MicroBatch
from coati_rl.batching.group_rules import GroupRules
from coati_rl.batching.packing import pack
from coati_rl.batching.sample_builder import build_samples

# Tokens in the loss of the three trajectories of `FORKED`: two of episode 0, the second one a fork, and episode 1.
COUNTS = (5, 1, 2)


@pytest.fixture(params=[False, True], ids=["alone", "shared"])
def micro_batch(forked_group: Any, request: pytest.FixtureRequest) -> MicroBatch:
    rules = GroupRules(max_new_tokens=8)
    samples = build_samples(forked_group(), rules=rules, loss_variation="sample_level", estimator=group_norm)
    ((only,),) = pack(samples, max_samples=8, shares_prefixes=request.param)
    assert [sample.num_loss_tokens for sample in samples] == [*COUNTS]
    return only


def arrays_of(micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
    arrays = {name: torch.tensor(array) for name, array in micro_batch.loss_arrays.items()}
    return {**arrays, "trainer_version": torch.tensor(9)}


def report(micro_batch: MicroBatch, log_ratios: list[float], **settings: Any) -> dict[str, torch.Tensor]:
    """The sums of a loss under a policy whose tokens have these log-ratios to the engine's, by trajectory."""
    arrays = arrays_of(micro_batch)
    logprobs = (arrays["rollout_logprobs"] + torch.tensor(log_ratios)).requires_grad_()
    return PolicyLoss(**settings)(logprobs, torch.zeros_like(logprobs), arrays)[1]


def test_the_ratio_of_a_sequence_is_the_mean_over_the_tokens_of_its_trajectory(micro_batch: MicroBatch) -> None:
    sums = report(micro_batch, [0.0, 0.0, 0.0, 0.0, 0.5, 0.4, 0.0, 0.0], ratio_level="sequence")
    assert sums["ratio_max"].item() == pytest.approx(np.exp(0.4))  # the fork's; over the episode 0.9 / 6 = 0.15


def test_a_ratio_above_the_threshold_skips_its_trajectory_alone(micro_batch: MicroBatch) -> None:
    none, fork = (report(micro_batch, [0.0] * 5 + [ratio, 0, 0], skip_threshold=20.0) for ratio in (0.0, 3.1))
    assert (none["skipped_samples"].item(), fork["skipped_samples"].item()) == (0, 1)
    # Advantages 0.7071 and -0.7071, weights of each episode's tokens in sum 1; 1 / 6 of the first one is left out.
    assert none["loss_sum"].item() == pytest.approx(0.0, abs=1e-4)
    assert fork["loss_sum"].item() == pytest.approx(0.7071 / 6, abs=1e-4)


def test_a_sequence_mask_judges_each_trajectory(micro_batch: MicroBatch) -> None:
    arrays = arrays_of(micro_batch)
    old = arrays["rollout_logprobs"] + torch.tensor([0.0] * 5 + [1.0] + [0.0] * 2)
    weights = correction_weights(
        *(old, arrays["rollout_logprobs"], arrays["loss_mask"], arrays["sample_index"]),
        correction="sequence_mask",
        low=0.5,
        high=2.0,
    )
    assert weights.tolist() == [[1.0] * 5 + [0.0] + [1.0] * 2]  # e is above 2; over the episode e ** (1 / 6) is not


def test_kl_in_the_reward_is_summed_to_the_end_of_the_trajectory(micro_batch: MicroBatch) -> None:
    arrays = micro_batch.loss_arrays
    reference = arrays["rollout_logprobs"] - np.float32(0.25)  # k1 = 0.25 a token
    scored = micro_batch.with_arrays(ref_logprobs=reference)
    changed, _ = subtract_kl_to_go(scored, kl_coeff=1.0, estimator="k1")
    taken = arrays["advantages"] - changed.loss_arrays["advantages"]
    assert taken[0].tolist() == pytest.approx([1.25, 1.0, 0.75, 0.5, 0.25, 0.25, 0.5, 0.25])
