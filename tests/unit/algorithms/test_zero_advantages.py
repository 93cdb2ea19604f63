"""Test that a sample of advantage 0 has no gradient, under every policy term, ratio and correction.

Trainers leave such samples out; which further terms forbid that is in tests/unit/coordinator/test_settings.py.
"""

from itertools import product

import pytest
import torch

from coati_rl.algorithms.choices import CORRECTION_BOUNDS, POLICY_LOSSES
from coati_rl.algorithms.loss import PolicyLoss

NUM_TOKENS = 60  # of each of two samples, which lie one after another in a row
BOUNDS = {"none": {"off_policy_low": 0.0, "off_policy_high": 2.0}, **CORRECTION_BOUNDS}
GUARDS = ({}, {"clip_dual": 3.0, "skip_threshold": 20.0})


def row(advantages, *, scale=1.0):
    """One row; ratios are far from 1 in both directions, and engine and trainer differ."""
    generator = torch.Generator().manual_seed(0)
    noise = scale * torch.randn(3, 1, 2 * NUM_TOKENS, generator=generator)
    advantages = torch.tensor(advantages).repeat_interleave(NUM_TOKENS)[None]
    return {
        "logprobs": -2 + noise[0],
        "old_logprobs": -2 + noise[1],
        "rollout_logprobs": -2 + noise[2],
        "advantages": advantages,
        "loss_mask": torch.ones(1, 2 * NUM_TOKENS, dtype=torch.bool),
        "loss_weights": torch.full((1, 2 * NUM_TOKENS), 1 / 7),
        "policy_version": torch.zeros(1, 2 * NUM_TOKENS, dtype=torch.int32),
        "sample_index": torch.arange(2).repeat_interleave(NUM_TOKENS)[None],
        "trainer_version": torch.tensor(0),
    }


def gradient(loss, arrays, *, places=slice(None)):
    """Of the loss on these tokens alone."""
    chosen = {name: array if array.dim() == 0 else array[:, places] for name, array in arrays.items()}
    logprobs = chosen.pop("logprobs").clone().requires_grad_()
    value, _ = loss(logprobs, torch.full_like(logprobs, 1.5), chosen)
    return torch.autograd.grad(value, logprobs)[0]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("policy_loss", "ratio_level", "correction"), [*product(POLICY_LOSSES, ("token", "sequence"), BOUNDS)]
)
def test_it_has_none_and_the_gradient_of_the_others_is_that_without_it(policy_loss, ratio_level, correction):
    for guards, scale, advantage in product(GUARDS, (1.0, 40.0), (1.0, -1.0)):
        loss = PolicyLoss(
            policy_loss=policy_loss,
            ratio_level=ratio_level,
            correction=correction,
            correction_low=BOUNDS[correction]["off_policy_low"],
            correction_high=BOUNDS[correction]["off_policy_high"],
            **guards,
        )
        arrays = row([advantage, 0.0], scale=scale)
        both, alone = gradient(loss, arrays), gradient(loss, arrays, places=slice(0, NUM_TOKENS))
        assert not both[:, NUM_TOKENS:].any()
        assert torch.equal(both[:, :NUM_TOKENS], alone)


@pytest.mark.parametrize(
    "settings",
    [
        {"entropy_coeff": 0.1},
        {"kl_coeff": 0.1},
        {"terms_fn": lambda logprobs, old, advantages, arrays: -logprobs},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_with_a_term_of_its_own_it_has_one(settings):
    arrays = row([0.0, 0.0])
    logprobs = arrays.pop("logprobs").requires_grad_()
    arrays["ref_logprobs"] = arrays["rollout_logprobs"]
    value, _ = PolicyLoss(**settings)(logprobs, 2 * logprobs, arrays)
    assert torch.autograd.grad(value, logprobs)[0].any()
