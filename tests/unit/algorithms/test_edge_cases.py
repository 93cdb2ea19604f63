"""Test what breaks a naive implementation, for every algorithm: nothing to learn from, one token, ratios of e^1000."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from coati_rl.algorithms.advantage import group_advantages
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.build import build_loss
from coati_rl.config import Config
from coati_rl.config.presets import PRESETS
from coati_rl.estimator import load_estimator
from tests.unit.algorithms.batches import LEAVES, evaluate, lay_out, random_samples
from tests.unit.algorithms.oracle import sample_loss

ALGORITHMS = tuple(PRESETS)
# Each part that may divide, take an exponential or look at a whole sample.
WITH_EVERYTHING = {
    "kl_place": "loss",
    "kl_coeff": 0.1,
    "entropy_coeff": 0.1,
    "off_policy_correction": "sequence_mask",
    "skip_threshold": 20.0,
}


def loss_of(algo: str, **changes: object) -> PolicyLoss:
    return build_loss(Config(algo=algo, **changes).algorithm)


@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("rewards", [[0.7] * 7, [0.0] * 4, [1.0]])
def test_a_group_that_is_all_equal_or_of_one_gives_zero_advantages(algo: str, rewards: list[float]) -> None:
    config = Config(algo=algo)
    found = group_advantages(
        np.array(rewards),
        np.ones(len(rewards), dtype=bool),
        estimator=load_estimator(config.algorithm.advantage_estimator),
        baseline=rewards[0],  # of a greedy answer, which is equal, too
    )
    # REINFORCE++ compares with the whole batch, later (see test_whitening), and PPO with a critic's values.
    is_alone = config.algorithm.advantage_estimator in ("reward", "gae")
    assert found.tolist() == (rewards if is_alone else [0.0] * len(rewards))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_advantages_of_zero_move_nothing_but_kl_and_entropy(algo: str) -> None:
    samples = [dataclasses.replace(s, advantages=np.zeros(s.length)) for s in random_samples()]
    value, sums, gradients = evaluate(loss_of(algo, kl_place="none", kl_coeff=0), lay_out(samples).arrays)
    assert value == 0
    assert not any(gradients[name].any() for name in LEAVES)
    assert sums["clip_sum"].item() == 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("changes", [{}, WITH_EVERYTHING], ids=["preset", "everything"])
def test_a_fully_masked_micro_batch_is_zero_with_a_gradient_of_zero(algo: str, changes: dict[str, object]) -> None:
    loss = loss_of(algo, **changes)
    arrays = lay_out(random_samples(), dtype=torch.float32).arrays
    arrays["loss_mask"] = torch.zeros_like(arrays["loss_mask"])
    arrays["loss_weights"] = torch.zeros_like(arrays["loss_weights"])
    value, sums, gradients = evaluate(loss, arrays)
    assert value == 0
    assert {total.item() for total in sums.values()} == {0.0}
    assert not any(gradients[name].any() for name in LEAVES)
    assert loss.is_final(sums)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_a_micro_batch_that_is_padding_alone_is_zero(algo: str) -> None:
    arrays = lay_out(random_samples()).arrays
    arrays["loss_mask"] = torch.zeros_like(arrays["loss_mask"])
    arrays["sample_index"] = torch.full_like(arrays["sample_index"], -1)
    value, sums, gradients = evaluate(loss_of(algo, **WITH_EVERYTHING), arrays)
    assert value == sums["num_tokens"].item() == 0
    assert not any(gradients[name].any() for name in LEAVES)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("changes", [{}, WITH_EVERYTHING], ids=["preset", "everything"])
def test_responses_of_one_token_are_the_formulas(algo: str, changes: dict[str, object]) -> None:
    loss = loss_of(algo, **changes)
    samples = random_samples((1, 1, 1), seed=1)
    batch = lay_out(samples, seed=4)
    value, _, gradients = evaluate(loss, batch.arrays)
    expected = [sample_loss(sample, loss) for sample in samples]
    assert value == pytest.approx(sum(total for total, _, _ in expected), rel=1e-12)
    for got, (_, wanted, _) in zip(batch.per_sample(gradients["logprobs"]), expected, strict=True):
        assert got.tolist() == pytest.approx(wanted.tolist(), rel=1e-12)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("algo", ALGORITHMS)
@pytest.mark.parametrize("skip_threshold", [None, 20.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_ratio_of_e_to_the_1000_leaves_loss_and_gradient_finite_and_other_samples_alone(
    algo: str, skip_threshold: float | None, log_ratio: float, advantage: float
) -> None:
    samples = random_samples((2, 3), seed=2)
    clean = lay_out(samples, dtype=torch.float32)
    samples[0].old_logprobs[1] = samples[0].logprobs[1] - log_ratio
    samples[0].ref_logprobs[1] = samples[0].logprobs[1] - log_ratio
    samples[0].advantages[:] = advantage
    astray = lay_out(samples, dtype=torch.float32)
    loss = loss_of(algo, skip_threshold=skip_threshold)
    value, sums, gradients = evaluate(loss, astray.arrays)
    assert math.isfinite(value)
    assert all(torch.isfinite(total) for total in sums.values())
    assert torch.isfinite(gradients["logprobs"]).all()
    _, _, undisturbed = evaluate(loss, clean.arrays)
    other, alone = astray.per_sample(gradients["logprobs"])[1], clean.per_sample(undisturbed["logprobs"])[1]
    np.testing.assert_array_equal(other, alone)
