"""Test what an optimizer step does with gradients, and that its settings may be its own."""

from pathlib import Path

import pytest
import torch

from coati_rl.config.optimizer import OptimizerConfig
from tests.unit.consumer.conftest import make_micro_batch
from tests.unit.consumer.test_backend import LOSS, SAMPLES, exported, make_backend, mini_batch, train


def test_gradients_are_summed_over_ranks_once_and_there_until_the_step(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    backend.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
    assert backend.policy.gradients == {}
    backend.reduce_gradients()
    held = backend.policy.gradients
    backend.reduce_gradients()
    assert backend.policy.gradients is held
    with pytest.raises(ValueError, match="take the step first"):
        backend.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
    assert {name: g.shape for name, g in backend.policy.gradients.items()} == {
        name: p.shape for name, p in backend.policy.module.named_parameters()
    }
    backend.optimizer_step(loss_scale=1.0, learning_rate=0.0)
    assert backend.policy.gradients == {}


def test_a_step_may_have_other_numbers_than_the_optimizer_began_with(model_dir: Path) -> None:
    asked = OptimizerConfig(adam_betas=(0.5, 0.6), adam_eps=1e-3, weight_decay=0.5, max_grad_norm=100.0)
    told, made = make_backend(model_dir), make_backend(model_dir, optimizer=asked)
    for backend, settings in ((told, asked), (made, None)):
        backend.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), LOSS)
        backend.optimizer_step(loss_scale=1.0, learning_rate=1e-2, settings=settings)
    assert all(torch.equal(weight, exported(made)[name]) for name, weight in exported(told).items())
    train(told), train(made)  # with those that they began with
    assert any(not torch.equal(weight, exported(made)[name]) for name, weight in exported(told).items())
