"""Test a reference that follows the policy, and an objective's state in a checkpoint."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.checkpoint.directory import OBJECTIVE_KEY, load_state, read_state
from coati_rl.config import Config
from coati_rl.config.control import ReferenceUpdate
from coati_rl.protocols import Role
from consumer.backend import Backend
from consumer.backend_config import ModelSource
from consumer.jobs.rl import models
from consumer.objectives.run_objective import policy_gradient
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.unit.consumer.conftest import make_micro_batch
from tests.unit.consumer.test_backend import mini_batch


def make_backend(model_dir: Path, reference_dir: Path | None = None) -> Backend:
    config = backend_config(model_dir, reference_dir=reference_dir or model_dir)
    sources = {**config.models, "reference": ModelSource(directory=reference_dir or model_dir, is_saved=True)}
    return Backend(dataclasses.replace(config, models=sources), SingleProcess(device=torch.device("cpu")))


def train(backend: Backend) -> None:
    backend.forward_backward(mini_batch(make_micro_batch(([1, 2, 3, 4, 5], 2))), PolicyLoss())
    backend.optimizer_step(loss_scale=1.0, learning_rate=1e-2)


def weights_of(backend: Backend, role: Role) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in backend.models[role].parameters.local.items()}


def test_the_reference_moves_by_a_share_of_the_difference_or_becomes_the_policy(model_dir: Path) -> None:
    backend = make_backend(model_dir)
    before = weights_of(backend, "reference")
    train(backend)
    policy = weights_of(backend, "policy")
    assert any((policy[name] != before[name]).any() for name in policy)
    backend.move_reference(0.25)
    for name, weight in weights_of(backend, "reference").items():
        assert torch.allclose(weight, 0.75 * before[name] + 0.25 * policy[name], atol=1e-7)
    backend.move_reference(1.0)
    assert all(torch.equal(weight, policy[name]) for name, weight in weights_of(backend, "reference").items())


def test_a_moved_reference_and_the_objectives_state_are_in_a_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    backend = make_backend(model_dir)
    train(backend)
    backend.move_reference(0.25)
    moved, checkpoint = weights_of(backend, "reference"), tmp_path / "step-1"
    backend.save(checkpoint, state={"step": 1}, objective={"kl_scale": 1.25})
    assert read_state(checkpoint)[OBJECTIVE_KEY] == {"kl_scale": 1.25}
    names = sorted(path.name for path in (checkpoint / "reference").iterdir())
    assert {"config.json", "model.safetensors"} <= {*names}
    assert not [name for name in names if name.startswith("optimizer")]
    again = make_backend(checkpoint, checkpoint / "reference")
    again.restore(checkpoint)
    assert all(torch.equal(weight, moved[name]) for name, weight in weights_of(again, "reference").items())


def test_a_run_takes_its_reference_from_the_checkpoint_if_it_moved_there(tmp_path: Path) -> None:
    config = Config(model=str(tmp_path / "start"), reference_update="every=2")
    checkpoint = tmp_path / "step-4"
    assert models(config, checkpoint)["reference"] == ModelSource(directory=tmp_path / "start", is_saved=True)
    (checkpoint / "reference").mkdir(parents=True)
    assert models(config, checkpoint)["reference"].directory == checkpoint / "reference"
    fixed = models(Config(model=str(tmp_path / "start")), checkpoint)["reference"]
    assert fixed == ModelSource(directory=tmp_path / "start")


def test_without_state_a_checkpoint_has_no_place_for_it(model_dir: Path, tmp_path: Path) -> None:
    make_backend(model_dir).save(tmp_path / "step-1", state={"step": 1})
    assert OBJECTIVE_KEY not in load_state(tmp_path / "step-1")
    assert json.loads((tmp_path / "step-1" / "state.json").read_text())["step"] == 1


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("every=2", [0.0, 1.0, 0.0, 1.0]),
        ("every=3,mix=0.6", [0.0, 0.0, 0.6, 0.0]),
        ("ema=0.9", [pytest.approx(0.1)] * 4),
        (None, [0.0] * 4),
    ],
)
def test_the_share_of_each_step(text: str | None, shares: list[float]) -> None:
    objective = policy_gradient(Config(reference_update=text))
    assert [objective.reference_mix(step) for step in range(4)] == shares


@pytest.mark.parametrize("text", ["every=0", "every=2,mix=0", "every=2,mix=1.5", "ema=1", "ema=-1", "2", "every=x", ""])
def test_what_is_no_update_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="every"):
        ReferenceUpdate.parse(text)
