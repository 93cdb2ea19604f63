"""Compare our loss with TRL's on the same tensors: value, gradient, and common metrics.

What differs on purpose is said where it matters: TRL adds its entropy bonus as a mean over tokens whatever the loss
averages over, and divides by what its own micro-batch holds unless told the batch's tokens.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.algorithms.over_length import over_length_penalty
from tests.unit.algorithms.trl_losses import L_MAX, LENGTHS, MEAN_OVER, SEEDS, assert_same, make_tensors, ours, theirs

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore:TRL currently supports vLLM")]


@pytest.mark.sampled(2)
@SEEDS
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "bnpo", "dr_grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_clip_with_separate_bounds_k3_and_gspo_are_trls_in_every_aggregation(
    trl, seed: int, loss_type: str, level: str, beta: float
) -> None:
    tensors = make_tensors(seed)
    loss = PolicyLoss(clip_low=0.2, clip_high=0.28, ratio_level=level, kl_coeff=beta)
    found = ours(loss, tensors, MEAN_OVER[loss_type])
    expected = theirs(trl, tensors, loss_type=loss_type, importance_sampling_level=level, beta=beta)
    assert_same(found, expected)
    if level == "token":  # their fraction is over samples at sequence level
        clipped = found[2]["clip_sum"] / sum(LENGTHS)
        assert clipped == pytest.approx(expected[2]["clip_ratio/region_mean"], rel=1e-6)
        assert found[2]["entropy_sum"] / sum(LENGTHS) == pytest.approx(expected[2]["entropy"], rel=1e-6)
    if beta > 0:
        assert found[2]["kl_sum"] / sum(LENGTHS) == pytest.approx(expected[2]["kl"], rel=1e-6)


@SEEDS
def test_gspo_at_the_papers_bounds_is_trls(trl, seed: int) -> None:
    tensors = make_tensors(seed, spread=1e-3)
    found = ours(PolicyLoss(clip_low=3e-4, clip_high=4e-4, ratio_level="sequence"), tensors, "sample_level")
    bounds = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
    assert_same(found, theirs(trl, tensors, loss_type="grpo", importance_sampling_level="sequence", **bounds))


@SEEDS
@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_cispo_without_a_lower_bound_is_trls_whose_epsilon_high_is_the_weight_itself(
    trl, seed: int, beta: float
) -> None:
    tensors = make_tensors(seed, spread=1.5)
    found = ours(PolicyLoss(policy_loss="cispo", clip_low=1.0, clip_high=4.0, kl_coeff=beta), tensors, "token_level")
    assert_same(found, theirs(trl, tensors, loss_type="cispo", epsilon_high=5.0, beta=beta))


@SEEDS
def test_dual_clip_above_the_upper_bound_is_trls_delta(trl, seed: int) -> None:
    # Their delta caps the ratio before the minimum; with delta <= 1 + epsilon_high it would act on A > 0 too, which our
    # rules refuse.
    tensors = make_tensors(seed, spread=1.5)
    tensors["advantages"][0] = -1.0
    tensors["old_logprobs"][0, 0] = tensors["logprobs"][0, 0] - 2  # a ratio of e^2, which only the dual clip bounds
    found = ours(PolicyLoss(clip_low=0.2, clip_high=0.28, clip_dual=3.0), tensors, "token_level")
    assert_same(found, theirs(trl, tensors, loss_type="dapo", delta=3.0))
    unbounded = ours(PolicyLoss(clip_low=0.2, clip_high=0.28), tensors, "token_level")
    assert unbounded[0] != found[0]


@SEEDS
def test_sapo_is_trls(trl: SimpleNamespace, seed: int) -> None:
    tensors = make_tensors(seed)
    found = ours(PolicyLoss(policy_loss="sapo", sapo_positive=1.25, sapo_negative=1.5), tensors, "sample_level")
    gates = {"sapo_temperature_pos": 1.25, "sapo_temperature_neg": 1.5}
    assert_same(found, theirs(trl, tensors, loss_type="sapo", **gates))


@SEEDS
def test_luspo_is_gspo_with_a_constant_length_as_its_denominator(trl: SimpleNamespace, seed: int) -> None:
    tensors = make_tensors(seed)
    value, gradient, report = ours(
        PolicyLoss(ratio_level="sequence", clip_low=0.2, clip_high=0.28), tensors, "constant"
    )
    right = theirs(trl, tensors, loss_type="luspo", importance_sampling_level="sequence")
    assert_same((L_MAX * value, L_MAX * gradient, report), right)


@pytest.mark.sampled(3)
@SEEDS
@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "cispo"])
@pytest.mark.parametrize(
    ("correction", "low", "high"), [("tis", 0.0, 2.0), ("tis", 0.5, 1.5), ("icepop", 0.5, 1.5), ("none", 0.0, 1.0)]
)
def test_importance_weights_of_the_engine_act_as_trls_and_leave_kl_alone(
    trl, seed: int, loss_type: str, correction: str, low: float, high: float
) -> None:
    tensors = make_tensors(seed)
    cispo = {"policy_loss": "cispo", "clip_low": 1.0, "clip_high": 4.0} if loss_type == "cispo" else {"clip_high": 0.28}
    loss = PolicyLoss(kl_coeff=0.1, correction=correction, correction_low=low, correction_high=high, **cispo)
    # As their _generate_and_score_completions has it: token_truncate is tis, token_mask is icepop. Their sequence_mask
    # goes by the product of the ratios, ours by its geometric mean, so it is not compared.
    ratio = torch.exp((tensors["old_logprobs"] - tensors["rollout_logprobs"]) * tensors["loss_mask"])
    if correction == "tis":
        ratio = torch.clamp(ratio, min=low, max=high)
    elif correction == "icepop":
        ratio = ratio.masked_fill((ratio < low) | (ratio > high), 0.0)
    else:
        ratio = torch.ones_like(ratio)
    epsilon_high = 5.0 if loss_type == "cispo" else 0.28
    settings = {"loss_type": loss_type, "beta": 0.1, "epsilon_high": epsilon_high}
    found = ours(loss, tensors, MEAN_OVER[loss_type])
    assert_same(found, theirs(trl, tensors, importance_sampling_ratio=ratio, **settings))


@SEEDS
def test_entropy_bonus_is_trls_where_the_loss_is_a_mean_over_tokens(trl, seed: int) -> None:
    tensors = make_tensors(seed)
    found = ours(PolicyLoss(clip_high=0.28, entropy_coeff=0.05), tensors, "token_level")
    assert_same(found, theirs(trl, tensors, loss_type="dapo", entropy_coef=0.05))


def test_at_sample_level_our_entropy_bonus_is_the_mean_of_samples_means_where_trls_stays_a_mean_over_tokens(
    trl,
) -> None:
    tensors = make_tensors(0)
    found = ours(PolicyLoss(clip_high=0.28, entropy_coeff=0.05), tensors, "sample_level")[0]
    expected = theirs(trl, tensors, loss_type="grpo", entropy_coef=0.05)[0]
    mask, entropy = tensors["loss_mask"], tensors["entropy"]
    of_tokens = entropy[mask].mean().item()
    of_samples = np.mean([entropy[i, :length].mean().item() for i, length in enumerate(LENGTHS)])
    assert found - expected == pytest.approx(-0.05 * (of_samples - of_tokens), rel=1e-10)


@SEEDS
@pytest.mark.parametrize("loss_type", ["grpo", "dapo"])
def test_in_float32_both_stay_within_rounding_of_each_other(trl, seed: int, loss_type: str) -> None:
    tensors = make_tensors(seed)
    single = {name: values.float() if values.is_floating_point() else values for name, values in tensors.items()}
    found = ours(PolicyLoss(clip_high=0.28, kl_coeff=0.1), single, MEAN_OVER[loss_type])
    expected = theirs(trl, single, loss_type=loss_type, beta=0.1)
    assert found[0] == pytest.approx(expected[0], rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(found[1].numpy(), expected[1].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("max_length", "cache"), [(16, 4), (20480, 4096), (5, 5)])
def test_over_length_punishment_is_trls(trl, max_length: int, cache: int) -> None:
    edges = {0, 1, max_length - cache - 1, max_length - cache, max_length - cache + 1, max_length - 1, max_length}
    lengths = [length for length in sorted(edges | {max_length + 1, 2 * max_length}) if length >= 0]
    expected = trl.rewards.get_soft_overlong_punishment(max_length, cache)(
        completion_ids=[[0] * length for length in lengths]
    )
    found = [over_length_penalty(length, max_length=max_length, cache_length=cache) for length in lengths]
    assert found == pytest.approx(expected, rel=1e-15)
