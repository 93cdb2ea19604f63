"""GRPO's loss and its report against a NumPy version in float64, written token by token from the paper."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.grpo import GrpoLoss
from coati_rl.algorithms.sums import merge_sums

R, L = 3, 5
LOSS = GrpoLoss(clip_low=0.2, clip_high=0.28, kl_coeff=0.1)


def make_batch(seed: int = 0) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)
    mask = np.array([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 0, 0]], dtype=bool)
    floats = {name: rng.normal(size=(R, L)) for name in ("advantages", "logprobs", "old", "rollout", "ref", "entropy")}
    return {
        "loss_mask": torch.tensor(mask),
        "loss_weights": torch.tensor(np.where(mask, rng.uniform(0.1, 1, (R, L)), 0), dtype=torch.float32),
        "advantages": torch.tensor(floats["advantages"], dtype=torch.float32),
        "logprobs": torch.tensor(-2 + 0.3 * floats["logprobs"], dtype=torch.float32),
        "old_logprobs": torch.tensor(-2 + 0.3 * floats["old"], dtype=torch.float32),
        "rollout_logprobs": torch.tensor(-2 + 0.3 * floats["rollout"], dtype=torch.float32),
        "ref_logprobs": torch.tensor(-2 + 0.3 * floats["ref"], dtype=torch.float32),
        "entropy": torch.tensor(np.abs(floats["entropy"]), dtype=torch.float32),
        "policy_version": torch.tensor([[-1, 6, 7, 7, -1], [-1, -1, 7, 7, 8], [-1, 7, -1, -1, -1]], dtype=torch.int32),
        "trainer_version": torch.tensor(7),
    }


def evaluate(loss: GrpoLoss, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, float], Tensor]:
    logprobs = batch["logprobs"].clone().requires_grad_()
    total, sums = loss(logprobs, batch["entropy"], batch)
    total.backward()
    return total.detach(), {name: value.item() for name, value in sums.items()}, logprobs.grad


def oracle(loss: GrpoLoss, batch: dict[str, Tensor], old: str = "old_logprobs") -> tuple[float, dict[str, float]]:
    value = {name: tensor.numpy().astype(np.float64) for name, tensor in batch.items()}
    report = dict.fromkeys(("loss_sum", "kl_sum", "clip_sum", "entropy_sum", "ratio_max", "num_tokens"), 0.0)
    report |= dict.fromkeys(("gap_sum", "gap_max", "gap_tokens"), 0.0)
    for at in zip(*np.nonzero(value["loss_mask"]), strict=True):
        ratio = math.exp(value["logprobs"][at] - value[old][at])
        advantage = value["advantages"][at]
        bounded = min(max(ratio, 1 - loss.clip_low), 1 + loss.clip_high)
        d = value["logprobs"][at] - value["ref_logprobs"][at]
        k3 = math.exp(-d) + d - 1
        term = -min(ratio * advantage, bounded * advantage) + loss.kl_coeff * k3
        report["loss_sum"] += value["loss_weights"][at] * term
        report["kl_sum"] += k3
        report["clip_sum"] += bounded * advantage < ratio * advantage
        report["entropy_sum"] += value["entropy"][at]
        report["ratio_max"] = max(report["ratio_max"], ratio)
        report["num_tokens"] += 1
        if value["policy_version"][at] == 7:
            gap = abs(value["logprobs"][at] - value["rollout_logprobs"][at])
            report["gap_sum"] += gap
            report["gap_max"] = max(report["gap_max"], gap)
            report["gap_tokens"] += 1
    return report["loss_sum"], report


def test_value_and_report_are_the_papers() -> None:
    loss, sums, _ = evaluate(LOSS, make_batch())
    expected, report = oracle(LOSS, make_batch())
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert sums == pytest.approx(report, rel=1e-5)
    assert sums["num_tokens"] == 7
    assert sums["gap_tokens"] == 5


def test_value_rollout_logprobs_stand_in_for_old_ones() -> None:
    batch = make_batch()
    del batch["old_logprobs"]
    loss, _, _ = evaluate(LOSS, batch)
    assert loss.item() == pytest.approx(oracle(LOSS, batch, old="rollout_logprobs")[0], rel=1e-5)


def test_gradient_is_that_of_a_difference_quotient_of_the_oracle() -> None:
    batch, step = make_batch(), 1e-4
    _, _, gradient = evaluate(LOSS, batch)
    for at in np.ndindex(R, L):
        ends = []
        for sign in (1, -1):
            moved = batch["logprobs"].double()
            moved[at] += sign * step
            ends.append(oracle(LOSS, {**batch, "logprobs": moved})[0])
        assert gradient[at].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-4, abs=1e-6)


def test_mask_padding_of_any_content_changes_nothing() -> None:
    batch = make_batch()
    expected = evaluate(LOSS, batch)
    hidden = ~batch["loss_mask"]
    for poison in (math.nan, -math.inf):
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "entropy")
        poisoned = {**batch, **{name: batch[name].masked_fill(hidden, poison) for name in names}}
        loss, sums, gradient = evaluate(LOSS, poisoned)
        assert loss == expected[0]
        assert sums == expected[1]
        assert torch.equal(gradient, expected[2])


def test_mask_a_batch_without_loss_tokens_is_zero_with_a_gradient_of_zero() -> None:
    batch = make_batch()
    batch["loss_mask"] = torch.zeros(R, L, dtype=torch.bool)
    loss, sums, gradient = evaluate(LOSS, batch)
    assert loss.item() == 0
    assert set(sums.values()) == {0.0}
    assert not gradient.any()


def test_split_rows_one_by_one_add_up_to_loss_report_and_gradient_of_all() -> None:
    batch = make_batch()
    loss, sums, gradient = evaluate(LOSS, batch)
    report: dict[str, Tensor] = {}
    total = 0.0
    for row in range(R):
        part = {name: value[row : row + 1] if value.ndim else value for name, value in batch.items()}
        part_loss, part_sums, part_gradient = evaluate(LOSS, part)
        total += part_loss.item()
        report = merge_sums(report, {name: torch.tensor(v, dtype=torch.float64) for name, v in part_sums.items()})
        assert torch.equal(part_gradient[0], gradient[row])
    assert total == pytest.approx(loss.item(), rel=1e-6)
    assert {name: value.item() for name, value in report.items()} == pytest.approx(sums, rel=1e-6)


def test_report_is_detached_float64_and_its_keys_depend_on_the_settings_alone() -> None:
    batch = make_batch()
    _, sums = LOSS(batch["logprobs"].requires_grad_(), batch["entropy"], batch)
    assert all(value.dtype == torch.float64 and not value.requires_grad for value in sums.values())
    without = dataclasses.replace(LOSS, kl_coeff=0.0)
    _, with_reference, _ = evaluate(without, batch := make_batch())
    del batch["ref_logprobs"]
    _, without_reference, _ = evaluate(without, batch)
    assert set(with_reference) == set(without_reference) == set(sums) - {"kl_sum"}


def test_refusal_of_a_penalty_without_a_reference_and_of_impossible_settings() -> None:
    batch = make_batch()
    del batch["ref_logprobs"]
    with pytest.raises(ValueError, match=r"kl_coeff = 0\.1 needs ref_logprobs"):
        LOSS(batch["logprobs"], batch["entropy"], batch)
    with pytest.raises(ValueError, match="clip_low"):
        GrpoLoss(clip_low=-0.1)
    with pytest.raises(ValueError, match="clip_high"):
        GrpoLoss(clip_high=-0.1)
    with pytest.raises(ValueError, match="kl_coeff"):
        GrpoLoss(kl_coeff=-0.1)
