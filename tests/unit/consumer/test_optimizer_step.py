"""Test what an optimizer step does with gradients, and that its settings may be its own."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.protocols import LossFn, Role
from consumer.backend import Backend
from consumer.backend_config import BackendConfig, frozen, trained
from consumer.objectives.cross_entropy import CrossEntropy
from consumer.objectives.objective import Objective
from consumer.objectives.own_loss import OwnLoss
from consumer.optim.learning_rate import LearningRate
from consumer.parallel.single_process import SingleProcess
from consumer.train_step import TrainStep
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


class TwoModels(Objective):
    """Trains the policy towards its tokens, and another model away from them."""

    @property
    def losses(self) -> Mapping[Role, LossFn]:
        return {"policy": CrossEntropy(), "reference": OwnLoss(lambda logprobs, entropy, batch: logprobs.sum())}

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        return {}


def test_each_trained_model_takes_the_step_of_its_own_loss_with_its_own_optimizer(
    model_dir: Path, make_model_dir
) -> None:
    other, clipped = make_model_dir(3), OptimizerConfig(max_grad_norm=1e-3, weight_decay=0.1)
    sources = {"policy": trained(model_dir), "reference": trained(other, clipped)}
    both = Backend(BackendConfig(models=sources), SingleProcess(device=torch.device("cpu")))
    TrainStep(both, TwoModels(), learning_rate=LearningRate(peak=1e-2)).run(mini_batch(make_micro_batch(*SAMPLES)))
    for role, loss, directory, optimizer in (
        ("policy", CrossEntropy(), model_dir, OptimizerConfig()),
        ("reference", TwoModels().losses["reference"], other, clipped),
    ):
        alone = make_backend(directory, optimizer=optimizer)
        alone.forward_backward(mini_batch(make_micro_batch(*SAMPLES)), loss)
        alone.optimizer_step(loss_scale=1.0, learning_rate=1e-2)
        expected = alone.policy.parameters.local
        found = both.models[role].parameters.local
        assert expected.keys() == found.keys()
        assert all(torch.equal(weight, expected[name]) for name, weight in found.items()), role


def test_only_a_frozen_model_can_be_freed(model_dir: Path) -> None:
    sources = {"policy": trained(model_dir), "reference": trained(model_dir), "teacher": frozen(model_dir)}
    backend = Backend(BackendConfig(models=sources), SingleProcess(device=torch.device("cpu")))
    backend.free("teacher")
    backend.free("old")  # which it never had
    assert set(backend.models) == {"policy", "reference"}
    with pytest.raises(ValueError, match="the reference model is trained"):
        backend.free("reference")
