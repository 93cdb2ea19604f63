"""Test the whole loss: two tokens by hand, padding, splits, its properties and its refusals.

`test_loss_oracle` compares it with the formulae on any batch.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.algorithms.sums import merge_sums
from tests.examples import examples
from tests.unit.algorithms.batches import LEAVES, POISON, POISONED, evaluate, lay_out, numbers, random_samples

LN2 = math.log(2)
FULL = PolicyLoss(
    clip_high=0.28,
    kl_coeff=0.1,
    entropy_coeff=0.05,
    correction="tis",
    correction_low=0.5,
    correction_high=1.5,
    skip_threshold=20.0,
)
BY_TOKEN = (FULL, dataclasses.replace(FULL, policy_loss="cispo"), dataclasses.replace(FULL, correction="icepop"))
BY_SAMPLE = (
    dataclasses.replace(FULL, ratio_level="sequence"),
    dataclasses.replace(FULL, correction="sequence_mask"),
    dataclasses.replace(FULL, correction="sequence_mask_tis"),
    dataclasses.replace(FULL, skip_threshold=1.5),
)


def two_tokens() -> dict[str, Tensor]:
    """Ratios 1 and 2 against the old policy, which finds both 3/2 times as likely as the engine; D = 0 and ln 2."""
    return {
        "logprobs": torch.tensor([[0.0, -1.0, -1.0]]),
        "entropy": torch.tensor([[9.0, 0.5, 0.25]]),
        "loss_mask": torch.tensor([[False, True, True]]),
        "loss_weights": torch.tensor([[0.0, 0.5, 0.25]]),
        "advantages": torch.tensor([[0.0, 2.0, -1.0]]),
        "old_logprobs": torch.tensor([[0.0, -1.0, -1 - LN2]]),
        "rollout_logprobs": torch.tensor([[0.0, -1 - math.log(1.5), -1 - LN2 - math.log(1.5)]]),
        "ref_logprobs": torch.tensor([[0.0, -1.0, -1 - LN2]]),
        "sample_index": torch.zeros(1, 3, dtype=torch.int32),
        "policy_version": torch.tensor([[-1, 7, 6]], dtype=torch.int32),
        "trainer_version": torch.tensor(7),
    }


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, 0.5 * -2 + 0.25 * 2),
        ({"clip_dual": 1.5}, 0.5 * -2 + 0.25 * 1.5),
        ({"kl_coeff": 0.1, "kl_estimator": "k1"}, -0.5 + 0.25 * 0.1 * LN2),
        ({"kl_coeff": 0.1, "kl_estimator": "k2"}, -0.5 + 0.25 * 0.1 * LN2**2 / 2),
        ({"kl_coeff": 0.1, "kl_estimator": "k3"}, -0.5 + 0.25 * 0.1 * (0.5 + LN2 - 1)),
        ({"kl_coeff": 0.1, "kl_estimator": "k3", "kl_clamp": 0.1}, -0.5 + 0.25 * 0.1 * 0.1),
        ({"entropy_coeff": 0.2}, -0.5 - 0.2 * (0.5 * 0.5 + 0.25 * 0.25)),
        ({"correction": "tis", "correction_high": 1.25}, 1.25 * -0.5),
        ({"correction": "icepop", "correction_low": 0.5, "correction_high": 2.0}, 1.5 * -0.5),
        ({"correction": "sequence_mask", "correction_low": 0.5, "correction_high": 1.4}, 0.0),
        ({"correction": "sequence_mask_tis", "correction_low": 0.5, "correction_high": 2.0}, 1.5 * -0.5),
        ({"correction": "tis", "kl_coeff": 0.1, "kl_estimator": "k1"}, 1.5 * -0.5 + 0.25 * 0.1 * LN2),  # KL as it is
        # geometric mean of 1 and 2 is sqrt 2, cut to 1.2 for A = 2 and not cut for A = -1
        ({"ratio_level": "sequence"}, 0.5 * -2 * 1.2 + 0.25 * math.sqrt(2)),
        # -w A log pi with w = 1 and 2 cut to 1.2
        ({"policy_loss": "cispo"}, 0.5 * 2 * 1 + 0.25 * 1.2 * -1),
        ({"skip_threshold": 1.9}, 0.0),
        ({"skip_threshold": 2.1}, -0.5),
    ],
)
def test_value_of_two_tokens_by_hand(change: dict[str, object], expected: float) -> None:
    value, _, _ = evaluate(PolicyLoss(**change), two_tokens())
    assert value == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_value_rollout_logprobs_stand_in_for_old_ones_and_leave_nothing_to_correct() -> None:
    batch = two_tokens()
    del batch["old_logprobs"]
    value, sums, _ = evaluate(PolicyLoss(correction="tis", clip_high=9.0), batch)
    assert value == pytest.approx(0.5 * -2 * 1.5 + 0.25 * 3, rel=1e-6)  # ratios 3/2 and 3, not cut
    assert sums["old_gap_max"].item() == 0
    assert sums["correction_sum"].item() == 2


def test_value_the_gap_to_the_engine_is_of_tokens_that_the_trainers_own_version_sampled() -> None:
    _, sums, _ = evaluate(PolicyLoss(), two_tokens())  # the first token is of version 7, as the trainer's weights
    assert sums["gap_tokens"].item() == 1
    assert sums["gap_sum"].item() == pytest.approx(math.log(1.5), rel=1e-6)
    assert sums["gap_max"].item() == pytest.approx(math.log(1.5), rel=1e-6)
    assert sums["old_gap_sum"].item() == pytest.approx(2 * math.log(1.5), rel=1e-6)
    assert sums["old_gap_max"].item() == pytest.approx(math.log(1.5), rel=1e-6)


def test_gradient_of_two_tokens_by_hand() -> None:
    # policy 1.5 * -r A: -3, 3; kl 0.1 * (1 - exp(-D)): 0, 0.05; entropies: -0.05 each
    loss = dataclasses.replace(FULL, clip_high=2.0, correction_high=2.0)
    _, _, gradients = evaluate(loss, two_tokens())
    assert gradients["logprobs"][0].tolist() == pytest.approx([0, 0.5 * -3, 0.25 * 3.05], rel=1e-6)
    assert gradients["entropy"][0].tolist() == pytest.approx([0, 0.5 * -0.05, 0.25 * -0.05], rel=1e-6)


def test_gradient_of_a_sequence_ratio_reaches_every_token_of_its_sample() -> None:
    # s = sqrt 2, both tokens have half of d(sum_t -w_t A_t s) / ds * s = -(0.5 * 2 - 0.25) * sqrt 2
    _, _, gradients = evaluate(PolicyLoss(ratio_level="sequence", clip_high=2.0), two_tokens())
    assert gradients["logprobs"][0, 1:].tolist() == pytest.approx([-0.75 * math.sqrt(2) / 2] * 2, rel=1e-6)


@pytest.mark.parametrize("loss", BY_TOKEN + BY_SAMPLE)
@pytest.mark.parametrize("poison", POISON)
def test_mask_padding_of_any_content_changes_nothing(loss: PolicyLoss, poison: float) -> None:
    batch = lay_out(random_samples(), seed=1)
    hidden = ~batch.arrays["loss_mask"]
    clean = {**batch.arrays, **{name: batch.arrays[name].masked_fill(hidden, 0.0) for name in POISONED}}
    poisoned = {**clean, **{name: clean[name].masked_fill(hidden, poison) for name in POISONED}}
    value, sums, gradients = evaluate(loss, clean)
    found, found_sums, found_gradients = evaluate(loss, poisoned)
    assert found == value
    assert numbers(found_sums) == numbers(sums)
    assert all(torch.equal(found_gradients[name], gradients[name]) for name in LEAVES)


@examples(60)
@given(cuts=st.sets(st.integers(1, 5)), seed=st.integers(0, 100), loss=st.sampled_from(BY_TOKEN + BY_SAMPLE))
def test_split_into_micro_batches_of_any_layout_adds_up_to_the_whole(
    cuts: set[int], seed: int, loss: PolicyLoss
) -> None:
    samples = random_samples((3, 1, 2, 4, 2, 3), seed=seed, spread=0.6)
    whole = lay_out(samples, seed=seed)
    value, sums, gradients = evaluate(loss, whole.arrays)
    total, report, found = 0.0, {}, []
    for start, stop in itertools.pairwise([0, *sorted(cuts), 6]):
        part = lay_out(samples[start:stop], seed=seed + start)
        part_value, part_sums, part_gradients = evaluate(loss, part.arrays)
        total += part_value
        report = merge_sums(report, part_sums)
        found += part.per_sample(part_gradients["logprobs"])
    assert total == pytest.approx(value, rel=1e-12)
    assert numbers(report) == pytest.approx(numbers(sums), rel=1e-12)
    for got, wanted in zip(found, whole.per_sample(gradients["logprobs"]), strict=True):
        assert got.tolist() == pytest.approx(wanted.tolist(), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("loss", BY_TOKEN)
def test_split_at_any_token_adds_up_to_the_whole_where_the_loss_says_that_it_is_separable(loss: PolicyLoss) -> None:
    assert loss.is_token_separable
    arrays = lay_out(random_samples(), seed=1).arrays
    value, sums, gradients = evaluate(loss, arrays)
    assert loss.is_final(sums)  # nothing is skipped, which would take whole samples
    total, report = 0.0, {}
    for column in range(arrays["loss_mask"].shape[1]):
        at = (slice(None), slice(column, column + 1))
        part = {name: array[at] if array.ndim else array for name, array in arrays.items()}
        part_value, part_sums, part_gradients = evaluate(loss, part)
        total += part_value
        report = merge_sums(report, part_sums)
        assert all(torch.equal(part_gradients[name], gradients[name][at]) for name in LEAVES)
    assert total == pytest.approx(value, rel=1e-12)
    assert numbers(report) == pytest.approx(numbers(sums), rel=1e-12)


@pytest.mark.parametrize("loss", BY_SAMPLE[:2])
def test_a_loss_whose_terms_see_the_whole_sample_says_that_it_is_not_separable(loss: PolicyLoss) -> None:
    assert not loss.is_token_separable


def test_a_loss_of_the_users_own_is_separable_only_if_it_says_so() -> None:
    def terms(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, arrays: dict[str, Tensor]) -> Tensor:
        return -advantages * logprobs

    loss = PolicyLoss(terms_fn=terms)
    assert not loss.is_token_separable
    value, sums, gradients = evaluate(loss, two_tokens())
    assert value == pytest.approx(0.5 * 2 - 0.25)
    assert gradients["logprobs"][0].tolist() == pytest.approx([0, -1, 0.25])
    assert sums["clip_sum"].item() == 0
    terms.is_token_separable = True
    assert loss.is_token_separable


def test_refusal_of_a_penalty_without_a_reference_and_of_terms_of_another_shape() -> None:
    batch = two_tokens()
    del batch["ref_logprobs"]
    with pytest.raises(ValueError, match=r"kl_coeff = 0\.1 needs ref_logprobs"):
        evaluate(PolicyLoss(kl_coeff=0.1), batch)
    with pytest.raises(ValueError, match=r"policy terms have shape \(1, 2\), tokens \(1, 3\)"):
        evaluate(PolicyLoss(terms_fn=lambda logprobs, *_: logprobs[:, 1:]), batch)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"clip_low": -0.1}, r"clip_low = -0\.1"),
        ({"clip_high": -0.1}, r"clip_high = -0\.1"),
        ({"clip_dual": 0.5}, r"clip_dual = 0\.5"),
        ({"kl_coeff": -0.1}, r"kl_coeff = -0\.1 must not be negative"),
        ({"entropy_coeff": math.nan}, "entropy_coeff = nan must not be negative"),
        ({"skip_threshold": 0.0}, r"skip_threshold = 0\.0"),
        ({"policy_loss": "cipso"}, "cipso"),
        ({"ratio_level": "sentence"}, "sentence"),
        ({"correction": "mis"}, "mis"),
        ({"kl_coeff": 0.1, "kl_estimator": "k4"}, "k4"),
        ({"correction": "tis", "correction_low": 3.0}, r"\[3\.0, 2\.0\] must be in order"),
    ],
)
def test_refusal_of_settings_that_mean_nothing_before_or_when_they_are_used(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(PolicyLoss(**change), two_tokens())
