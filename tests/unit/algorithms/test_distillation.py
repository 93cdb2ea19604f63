"""Test the teacher's part of advantages: three tokens by hand, any layout, and the gradient that it estimates."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from coati_rl.algorithms.distillation import add_teacher_advantages
from coati_rl.batch import MicroBatch
from tests.micro_batches import grid_micro_batch
from tests.unit.algorithms.batches import lay_out, numbers, random_samples, to_micro_batch


def row(teacher: list[float], *, old: list[float] | None, rollout: list[float], advantage: float = 1.0) -> MicroBatch:
    """A prompt token, then one response token for each number."""
    shape = (1, len(teacher) + 1)

    def padded(values: list[float]) -> np.ndarray:
        return np.array([[0.0, *values]], np.float32)

    mask = np.arange(shape[1])[None] > 0
    arrays = {"teacher_logprobs": padded(teacher), "rollout_logprobs": padded(rollout), "loss_mask": mask}
    arrays |= {} if old is None else {"old_logprobs": padded(old)}
    return grid_micro_batch(
        token_ids=np.zeros(shape, np.int64),
        position_ids=np.zeros(shape, np.int64),
        sample_index=np.zeros(shape, np.int32),
        advantages=np.where(mask, advantage, 0.0).astype(np.float32),
        **arrays,
    )


def advantages(micro_batch: MicroBatch) -> list[float]:
    return micro_batch.loss_arrays["advantages"][0].tolist()


def test_value_each_token_is_rewarded_by_the_teachers_log_probability_over_its_own() -> None:
    # log p_old - log p_teacher: 1, -2, 0.5; half of it is taken off an advantage of 1
    found, sums = add_teacher_advantages(row([-2.0, -1.0, -1.5], old=[-1.0, -3.0, -1.0], rollout=[-9.0] * 3), coeff=0.5)
    assert advantages(found) == [0.0, 0.5, 2.0, 0.75]
    assert numbers(sums) == {"teacher_kl_sum": -0.5}


def test_value_rollout_logprobs_stand_in_for_old_ones() -> None:
    found, sums = add_teacher_advantages(row([-2.0, -1.0], old=None, rollout=[-1.0, -3.0], advantage=0.0), coeff=1.0)
    assert advantages(found) == [0.0, -1.0, 2.0]
    assert numbers(sums) == {"teacher_kl_sum": -1.0}


@pytest.mark.parametrize("poison", [math.nan, -math.inf, math.inf])
def test_mask_what_the_loss_does_not_count_neither_counts_nor_changes(poison: float) -> None:
    micro_batch = row([-2.0, poison, -1.5], old=[-1.0, poison, -1.0], rollout=[poison] * 3)
    mask = np.array([[False, True, False, True]])
    found, sums = add_teacher_advantages(micro_batch.with_arrays(loss_mask=mask), coeff=1.0)
    assert advantages(found) == [0.0, 0.0, 1.0, 0.5]
    assert numbers(sums) == {"teacher_kl_sum": 1.5}


def test_split_a_token_has_the_same_advantage_alone_as_in_any_row() -> None:
    samples = random_samples((3, 1, 4, 2), seed=2)
    batch = lay_out(samples, seed=2)
    micro_batch = to_micro_batch(batch)
    micro_batch = micro_batch.with_arrays(teacher_logprobs=micro_batch.loss_arrays["ref_logprobs"])
    found, _ = add_teacher_advantages(micro_batch, coeff=0.3)
    for place, sample in zip(batch.places, samples, strict=True):
        expected = sample.advantages - 0.3 * (sample.old_logprobs - sample.ref_logprobs)
        np.testing.assert_allclose(found.loss_arrays["advantages"][place], expected, rtol=1e-5, atol=1e-6)


def test_gradient_over_all_tokens_a_place_may_have_is_that_of_the_reverse_kl() -> None:
    """E[-A grad log p] with A = log p_teacher - log p is grad KL(p || p_teacher): summed over the vocabulary here."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(7, generator=generator, dtype=torch.float64), dim=-1)
    logprobs = torch.log_softmax(logits, dim=-1)
    (expected,) = torch.autograd.grad((logprobs.exp() * (logprobs - teacher)).sum(), logits, retain_graph=True)
    old = logprobs.detach().tolist()
    found, _ = add_teacher_advantages(row(teacher.tolist(), old=old, rollout=old, advantage=0.0), coeff=1.0)
    weights = torch.tensor(advantages(found)[1:], dtype=torch.float64)
    (gradient,) = torch.autograd.grad(-(logprobs.detach().exp() * weights * logprobs).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)


def test_refusal_without_a_teacher() -> None:
    micro_batch = row([-1.0], old=None, rollout=[-1.0])
    arrays = {name: array for name, array in micro_batch.loss_arrays.items() if name != "teacher_logprobs"}
    with pytest.raises(ValueError, match="distillation needs teacher_logprobs"):
        add_teacher_advantages(dataclasses.replace(micro_batch, loss_arrays=arrays), coeff=1.0)
