"""The plain backend's contract, which the Colossal backend inherits: what is summed, scaled, reported and refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from coati_rl.algorithms.grpo import GrpoLoss
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.errors import EngineError
from consumer.torch_backend import BackendConfig, TorchBackend
from tests.unit.consumer.conftest import make_micro_batch

SAMPLES = [([1, 2, 3, 4, 5], 2), ([6, 7, 8, 9], 1), ([3, 1, 4, 1, 5, 9], 3)]
LOSS = GrpoLoss()


def make_backend(model_dir: Path, **settings: object) -> TorchBackend:
    return TorchBackend(BackendConfig(**{"model_dir": model_dir, **settings}), device=torch.device("cpu"))


def mini_batch(*micro_batches: MicroBatch, step: int = 0, is_last: bool = True) -> MiniBatch:
    return MiniBatch(
        step=step, micro_batches=micro_batches, is_last=is_last, loss_scale=1.0, learning_rate_progress=0.0
    )


def gradient(backend: TorchBackend) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in backend.policy.parameters()])


def test_gradients_add_up_over_micro_batches_and_mini_batches(model_dir: Path) -> None:
    whole, parts = make_backend(model_dir), make_backend(model_dir)
    sums = whole.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
    first = parts.forward_backward(
        mini_batch(make_micro_batch(SAMPLES[0]), make_micro_batch(SAMPLES[1]), is_last=False), LOSS
    )
    last = parts.forward_backward(mini_batch(make_micro_batch(SAMPLES[2])), LOSS)
    assert (gradient(whole) - gradient(parts)).norm() / gradient(whole).norm() < 1e-5
    assert sums["num_tokens"] == 9
    assert first["num_tokens"] + last["num_tokens"] == 9
    assert (first["loss_sum"] + last["loss_sum"]).item() == pytest.approx(sums["loss_sum"].item(), rel=1e-6)
    assert sums["ratio_max"] == pytest.approx(max(first["ratio_max"], last["ratio_max"]))


def test_a_last_mini_batch_without_samples_reports_zeros_and_has_a_gradient_of_zero(model_dir: Path) -> None:
    backend = make_backend(model_dir, reference_dir=model_dir)
    sums = backend.forward_backward(mini_batch(), GrpoLoss(kl_coeff=0.1))
    assert set(sums) >= {"num_tokens", "kl_sum", "gap_tokens"}
    assert all(value.item() == 0 for value in sums.values())
    assert not gradient(backend).any()


def test_a_mini_batch_without_samples_that_is_not_the_last_does_nothing(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    assert backend.forward_backward(mini_batch(is_last=False), LOSS) == {}
    assert all(p.grad is None for p in backend.policy.parameters())


def test_a_step_forgets_its_gradient_and_uses_the_rate_it_is_given(model_dir: Path) -> None:
    backend = make_backend(model_dir, weight_decay=0.0)
    before = backend.policy.get_parameter("model.norm.weight").detach().clone()
    for learning_rate in (0.0, 1e-2):
        backend.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
        assert backend.optimizer_step(loss_scale=1 / 3, learning_rate=learning_rate) > 0
        assert all(p.grad is None for p in backend.policy.parameters())
        moved = (backend.policy.get_parameter("model.norm.weight") - before).abs().max().item()
        assert moved == pytest.approx(learning_rate, rel=1e-3)  # AdamW's first steps are of the rate's size


def test_the_norm_is_that_of_the_scaled_gradient(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    backend.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
    expected = gradient(backend).norm().item() / 3
    assert backend.optimizer_step(loss_scale=1 / 3, learning_rate=0.0) == pytest.approx(expected, rel=1e-5)


def test_scores_are_the_losss_own_log_probabilities_and_leave_no_gradient(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    seen = []

    def record(logprobs: torch.Tensor, entropy: torch.Tensor, tensors: dict) -> tuple[torch.Tensor, dict]:
        seen.append((logprobs.detach(), entropy, tensors["trainer_version"].item()))
        return logprobs.sum(), {}

    micro_batch = make_micro_batch(*SAMPLES)
    backend.forward_backward(mini_batch(micro_batch, step=7), record)
    scores = backend.score(micro_batch, use_reference=False)
    assert torch.equal(scores, seen[0][0])
    assert not scores.requires_grad
    assert (seen[0][1][torch.tensor(micro_batch.loss_mask)] > 0).all()
    assert seen[0][2] == 7


def test_the_reference_is_another_model_that_does_not_train(model_dir: Path, save_model) -> None:
    other = save_model(tie_word_embeddings=False, num_hidden_layers=1)
    backend = make_backend(model_dir, reference_dir=other)
    micro_batch = make_micro_batch(*SAMPLES)
    expected = make_backend(other).score(micro_batch, use_reference=False)
    assert torch.equal(backend.score(micro_batch, use_reference=True), expected)
    with pytest.raises(ValueError, match="without a reference"):
        make_backend(model_dir).score(micro_batch, use_reference=True)


def test_a_gradient_that_is_not_finite_stops_the_run_before_any_weight_moves(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    before = {name: weight.clone() for name, weight in backend.export_weights()}
    micro_batch = make_micro_batch(*SAMPLES)
    infinite = np.where(micro_batch.loss_mask, np.float32(np.inf), np.float32(0))
    poisoned = dataclasses.replace(micro_batch, advantages=infinite)
    backend.forward_backward(mini_batch(poisoned), LOSS)
    with pytest.raises(EngineError, match="the gradient norm is nan"):
        backend.optimizer_step(loss_scale=1.0, learning_rate=1e-3)
    assert all(torch.equal(before[name], weight) for name, weight in backend.export_weights())
