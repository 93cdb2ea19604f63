"""Test any loss on any batch against the oracle: value, both gradients, zero on padding, the report."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from coati_rl.algorithms.choices import LOSSES_OF_SEQUENCES, POLICY_LOSSES
from coati_rl.algorithms.loss import PolicyLoss
from tests.examples import examples
from tests.unit.algorithms.batches import LEAVES, any_samples, evaluate, lay_out, numbers, random_samples
from tests.unit.algorithms.oracle import (
    VERSION,
    Sample,
    correction,
    exp_ratio,
    is_masked,
    kl_term,
    log_ratios,
    sample_loss,
)

BOUNDS = {"none": (0.0, 1.0), "tis": (0.0, 2.0), "icepop": (0.5, 5.0)} | {
    "sequence_tis": (0.0, 2.0),
    "sequence_mask": (0.4, 2.1),
    "sequence_mask_tis": (0.4, 2.1),
}


@st.composite
def any_loss(draw: st.DrawFn) -> PolicyLoss:
    policy_loss = draw(st.sampled_from(POLICY_LOSSES))
    levels = ("token",) if policy_loss in LOSSES_OF_SEQUENCES else ("token", "sequence")
    name = draw(st.sampled_from(tuple(BOUNDS)))
    low, high = BOUNDS[name]
    if name == "tis":
        low = draw(st.sampled_from((0.0, 0.5)))
    return PolicyLoss(
        policy_loss=policy_loss,
        ratio_level=draw(st.sampled_from(levels)),
        clip_low=draw(st.sampled_from((3e-4, 0.2, 1.0))),
        clip_high=draw(st.sampled_from((4e-4, 0.28, 4.0))),
        clip_dual=draw(st.sampled_from((None, 6.0))) if policy_loss == "clip" else None,
        kl_coeff=draw(st.sampled_from((0.0, 0.3))),
        kl_estimator=draw(st.sampled_from(("k1", "k2", "k3"))),
        kl_has_ratio=draw(st.booleans()),
        entropy_coeff=draw(st.sampled_from((0.0, 0.2))),
        correction=name,
        correction_low=low,
        correction_high=high,
        skip_threshold=draw(st.sampled_from((None, 5.0))),
        drift_threshold=draw(st.sampled_from((None, 0.3))),
    )


def is_on_an_edge(sample: Sample, loss: PolicyLoss) -> bool:
    """A ratio so close to a bound that rounding decides on which side of it the token is."""
    bounds = [loss.clip_dual, loss.skip_threshold, 1 - loss.clip_low, 1 + loss.clip_high, math.exp(20)]
    logs = log_ratios(sample, loss.ratio_level)[0]
    ratios = [exp_ratio(r)[0] for r in logs]
    gaps = sample.old_logprobs - sample.rollout_logprobs
    weights = [exp_ratio(float(gap))[0] for gap in (*gaps, gaps.mean(), gaps.sum())]
    pairs = [(r, bound) for r in ratios for bound in bounds if bound is not None]
    pairs += [(w, bound) for w in weights for bound in (loss.correction_low, loss.correction_high)]
    if loss.policy_loss == "gmpo":
        pairs += [
            (math.exp(log_ratio), math.exp(bound)) for log_ratio in logs for bound in (-loss.clip_low, loss.clip_high)
        ]
    if loss.drift_threshold is not None:
        pairs.append((float((sample.rollout_logprobs - sample.logprobs).mean()), loss.drift_threshold))
    return any(abs(value - bound) < 1e-9 * bound for value, bound in pairs)


def far_from_the_reference(distance: float) -> Sample:
    """A token whose reference is so many nats above it, and nothing else."""
    zeros = np.zeros(1)
    return Sample(
        logprobs=zeros,
        old_logprobs=zeros,
        rollout_logprobs=zeros,
        ref_logprobs=zeros + distance,
        entropy=zeros,
        advantages=zeros,
        loss_weights=np.array([0.9668896321070234]),
        policy_version=np.array([VERSION - 1], dtype=np.int32),
    )


K3_UNDER_A_RATIO = PolicyLoss(policy_loss="gmpo", kl_coeff=0.3, kl_estimator="k3", kl_has_ratio=True)


@examples(150)
@example([far_from_the_reference(19.0)], K3_UNDER_A_RATIO, 0)
@given(any_samples(), any_loss(), st.integers(0, 1000))
def test_value_and_gradients_are_the_formulas(samples: list[Sample], loss: PolicyLoss, seed: int) -> None:
    assume(not any(is_on_an_edge(sample, loss) for sample in samples))
    batch = lay_out(samples, seed=seed)
    value, sums, gradients = evaluate(loss, batch.arrays)
    expected = [sample_loss(sample, loss) for sample in samples]
    size = sum(abs(total) for total, _, _ in expected)
    assert value == pytest.approx(sum(total for total, _, _ in expected), rel=1e-9, abs=1e-9 * (1 + size))
    assert sums["loss_sum"].item() == value
    for name, index in zip(LEAVES, (1, 2), strict=True):
        assert not gradients[name][~batch.arrays["loss_mask"]].any()  # no NaN either: NaN is true
        found = batch.per_sample(gradients[name])
        for sample, got, wanted in zip(samples, found, (parts[index] for parts in expected), strict=True):
            # Under a ratio k3's gradient is -d, the difference of two terms of e^d: their rounding is all that is left.
            cancelled = np.finfo(np.float64).eps * np.exp(sample.ref_logprobs - sample.logprobs).max()
            atol = (1e-9 + cancelled) * (1 + np.abs(wanted).max())
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=atol)


def report_of(samples: list[Sample], loss: PolicyLoss) -> dict[str, float]:
    """Count what the docstring of PolicyLoss defines."""
    report = dict.fromkeys(("num_tokens", "entropy_sum", "clip_sum", "ratio_max"), 0.0)
    report |= dict.fromkeys(("gap_tokens", "gap_sum", "gap_max", "old_gap_sum", "old_gap_max"), 0.0)
    report |= {"kl_sum": 0.0} if loss.kl_coeff > 0 else {}
    report |= {"skipped_samples": 0.0} if loss.skip_threshold is not None else {}
    report |= {"correction_sum": 0.0, "correction_dropped": 0.0} if loss.correction != "none" else {}
    report |= {"drifted_tokens": 0.0} if loss.drift_threshold is not None else {}
    for sample in samples:
        logs = log_ratios(sample, loss.ratio_level)[0]
        ratios = [exp_ratio(r)[0] for r in logs]
        if loss.drift_threshold is not None:
            report["drifted_tokens"] += sum(is_masked(sample, loss))
        weights = correction(sample, loss.correction, loss.correction_low, loss.correction_high)
        if loss.skip_threshold is not None:
            report["skipped_samples"] += max(ratios) > loss.skip_threshold
        for t, ratio in enumerate(ratios):
            at = {name: float(getattr(sample, name)[t]) for name in sample.__dataclass_fields__}
            report["num_tokens"] += 1
            report["entropy_sum"] += at["entropy"]
            report["ratio_max"] = max(report["ratio_max"], ratio)
            is_low, is_high = ratio < 1 - loss.clip_low, ratio > 1 + loss.clip_high
            if loss.policy_loss == "cispo":
                report["clip_sum"] += is_low or is_high
            elif loss.policy_loss == "gmpo":
                is_above, is_below = logs[t] > loss.clip_high, logs[t] < -loss.clip_low
                report["clip_sum"] += is_above if at["advantages"] > 0 else at["advantages"] < 0 and is_below
            elif loss.policy_loss == "clip":
                is_dual = loss.clip_dual is not None and ratio > loss.clip_dual
                report["clip_sum"] += is_high if at["advantages"] > 0 else at["advantages"] < 0 and (is_low or is_dual)
            if "kl_sum" in report:
                report["kl_sum"] += kl_term(at["logprobs"], at["ref_logprobs"], loss.kl_estimator)[0]
            if loss.correction != "none":
                report["correction_sum"] += weights[t]
                report["correction_dropped"] += weights[t] == 0
            old_gap = abs(at["old_logprobs"] - at["rollout_logprobs"])
            report["old_gap_sum"] += old_gap
            report["old_gap_max"] = max(report["old_gap_max"], old_gap)
            if at["policy_version"] == VERSION:
                gap = abs(at["logprobs"] - at["rollout_logprobs"])
                report["gap_tokens"] += 1
                report["gap_sum"] += gap
                report["gap_max"] = max(report["gap_max"], gap)
    return report


@examples(100)
@given(any_samples(), any_loss(), st.integers(0, 1000))
def test_the_report_holds_what_its_docstring_says_and_its_keys_depend_on_the_settings_alone(
    samples: list[Sample], loss: PolicyLoss, seed: int
) -> None:
    assume(not any(is_on_an_edge(sample, loss) for sample in samples))
    value, sums, _ = evaluate(loss, lay_out(samples, seed=seed).arrays)
    assert all(total.dtype == torch.float64 and not total.requires_grad for total in sums.values())
    assert numbers(sums) == pytest.approx(report_of(samples, loss) | {"loss_sum": value}, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("policy_loss", "level"),
    [
        *itertools.product(("clip", "cispo", "sapo"), ("token", "sequence")),
        *((policy_loss, "token") for policy_loss in LOSSES_OF_SEQUENCES),
    ],
)
def test_in_float32_value_and_gradient_stay_within_rounding(policy_loss: str, level: str) -> None:
    loss = PolicyLoss(
        policy_loss=policy_loss, ratio_level=level, kl_coeff=0.1, entropy_coeff=0.1, correction="tis", clip_high=0.28
    )
    samples = random_samples((7, 1, 30, 12, 2), seed=3)
    batch = lay_out(samples, seed=3, dtype=torch.float32)
    value, _, gradients = evaluate(loss, batch.arrays)
    expected = [sample_loss(sample, loss) for sample in samples]
    assert value == pytest.approx(sum(total for total, _, _ in expected), rel=1e-5, abs=1e-5)
    for got, (_, wanted, _) in zip(batch.per_sample(gradients["logprobs"]), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@examples(60)
@given(st.integers(0, 10_000), any_loss())
def test_the_oracles_gradient_is_the_difference_quotient_of_its_value(seed: int, loss: PolicyLoss) -> None:
    sample, step = random_samples((3,), seed=seed)[0], 1e-6
    assume(loss.policy_loss not in ("cispo", "vespo"))  # their weight is no part of the gradient, but of a quotient
    assume(loss.drift_threshold is None)
    bounds = [math.log(b) for b in (1 - loss.clip_low, 1 + loss.clip_high, loss.clip_dual, loss.skip_threshold) if b]
    ratios = log_ratios(sample, loss.ratio_level)[0]
    bounds += [-loss.clip_low, loss.clip_high] if loss.policy_loss == "gmpo" else []
    assume(all(abs(r - bound) > 1e-4 for r in ratios for bound in bounds))
    _, gradient, entropy_gradient = sample_loss(sample, loss)
    for name, wanted in (("logprobs", gradient), ("entropy", entropy_gradient)):
        for t in range(sample.length):
            ends = []
            for sign in (1, -1):
                values = getattr(sample, name).copy()
                values[t] += sign * step
                ends.append(sample_loss(Sample(**{**sample.__dict__, name: values}), loss)[0])
            assert wanted[t] == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-7)
