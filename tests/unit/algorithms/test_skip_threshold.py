"""Test that only a sample with a ratio above the threshold is skipped and counted, and stays in the denominator."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from tests.unit.algorithms.batches import evaluate, lay_out, random_samples
from tests.unit.algorithms.oracle import sample_loss

LOSS = PolicyLoss(skip_threshold=20.0, kl_coeff=0.1, entropy_coeff=0.1)


def packed_row(*log_ratios: list[float]) -> dict[str, Tensor]:
    """Samples in one row, each after one prompt token; A = 1, weight 1/2, log pi = -1, reference and engine equal."""
    row = [value for sample in log_ratios for value in (None, *sample)]
    index = [i for i, sample in enumerate(log_ratios) for _ in (None, *sample)]
    mask = torch.tensor([[value is not None for value in row]])
    logprobs = torch.full(mask.shape, -1.0)
    old_logprobs = logprobs - torch.tensor([[value or 0.0 for value in row]])
    return {
        "logprobs": logprobs,
        "entropy": torch.full(mask.shape, 2.0),
        "loss_mask": mask,
        "loss_weights": torch.where(mask, 0.5, 0.0),
        "advantages": torch.ones(mask.shape),
        "old_logprobs": old_logprobs,
        "rollout_logprobs": old_logprobs,
        "ref_logprobs": logprobs,
        "sample_index": torch.tensor([index], dtype=torch.int32),
        "policy_version": torch.full(mask.shape, 7, dtype=torch.int32),
        "trainer_version": torch.tensor(7),
    }


def test_value_of_a_packed_row_lacks_the_skipped_sample_and_keeps_the_others() -> None:
    # Each token: -1 - 0.1 * 2 (entropy), KL 0. The second sample's ratio e^4 = 54.6 takes all of its tokens out.
    value, sums, gradients = evaluate(LOSS, packed_row([0.0, 0.0], [0.0, 4.0], [0.0]))
    assert value == pytest.approx(3 * 0.5 * -1.2, rel=1e-6)
    assert sums["skipped_samples"].item() == 1
    assert sums["num_tokens"].item() == 5  # counted as ever: the denominator stays
    assert sums["ratio_max"].item() == pytest.approx(math.exp(4), rel=1e-6)
    assert gradients["logprobs"][0].tolist() == pytest.approx([0, -0.5, -0.5, 0, 0, 0, 0, -0.5])
    assert gradients["entropy"][0].tolist() == pytest.approx([0, -0.05, -0.05, 0, 0, 0, 0, -0.05])


def test_a_ratio_that_is_the_threshold_is_not_above_it() -> None:
    batch = packed_row([0.0, 4.0], [0.0])
    largest = evaluate(LOSS, batch)[1]["ratio_max"].item()
    for threshold, num_skipped in ((largest, 0), (0.999 * largest, 1)):
        loss = replace(LOSS, skip_threshold=threshold)
        _, sums, _ = evaluate(loss, batch)
        assert sums["skipped_samples"].item() == num_skipped
        assert loss.is_final(sums) == (num_skipped == 0)


def test_gradient_of_the_samples_that_stay_is_what_it_is_without_the_other() -> None:
    samples = random_samples((3, 2, 4), seed=5)
    samples[1].old_logprobs[1] = samples[1].logprobs[1] - math.log(21)
    batch = lay_out(samples, seed=5)
    _, sums, gradients = evaluate(LOSS, batch.arrays)
    found = batch.per_sample(gradients["logprobs"])
    assert sums["skipped_samples"].item() == 1
    assert found[1].tolist() == [0.0, 0.0]
    for i in (0, 2):
        assert found[i].tolist() == pytest.approx(sample_loss(samples[i], LOSS)[1].tolist(), rel=1e-12)


def test_a_ratio_below_the_threshold_is_kept_and_without_a_threshold_all_are() -> None:
    for loss, log_ratio in ((LOSS, math.log(19.9)), (PolicyLoss(), 4.0)):
        _, sums, gradients = evaluate(loss, packed_row([0.0, log_ratio]))
        assert sums.get("skipped_samples", torch.tensor(0)).item() == 0
        assert gradients["logprobs"][0, 1] != 0


def test_mask_a_ratio_that_the_loss_does_not_count_skips_nothing() -> None:
    batch = packed_row([0.0, 4.0])
    batch["loss_mask"][0, 2] = False
    batch["loss_weights"][0, 2] = 0.0
    value, sums, _ = evaluate(LOSS, batch)
    assert value == pytest.approx(0.5 * -1.2, rel=1e-6)
    assert sums["skipped_samples"].item() == 0


def test_at_sequence_level_the_ratio_of_the_whole_response_decides() -> None:
    # e^4 of one token is exp((0 + 4) / 2) = 7.4 of its response; two of them are e^4
    loss = PolicyLoss(skip_threshold=20.0, ratio_level="sequence")
    _, sums, _ = evaluate(loss, packed_row([0.0, 4.0], [4.0, 4.0]))
    assert sums["skipped_samples"].item() == 1


def test_split_samples_are_skipped_alone_as_in_one_row() -> None:
    samples = [[0.0, 0.0], [0.0, 4.0], [5.0]]
    value, sums, _ = evaluate(LOSS, packed_row(*samples))
    parts = [evaluate(LOSS, packed_row(sample)) for sample in samples]
    assert value == pytest.approx(sum(part[0] for part in parts), rel=1e-6)
    assert sums["skipped_samples"].item() == sum(part[1]["skipped_samples"].item() for part in parts) == 2


def test_split_by_tokens_a_report_with_a_ratio_above_the_threshold_is_not_final() -> None:
    batch = packed_row([0.0, 4.0])
    token = {name: array[:, 2:] if array.ndim else array for name, array in batch.items()}
    assert LOSS.is_final(evaluate(LOSS, packed_row([0.0, 2.0]))[1])
    assert not LOSS.is_final(evaluate(LOSS, token)[1])
    assert PolicyLoss().is_final(evaluate(PolicyLoss(), token)[1])
