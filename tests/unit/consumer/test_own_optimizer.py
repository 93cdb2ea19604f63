"""Test that a backend steps with an optimizer of the user's own, and resumes it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.errors import ConfigError
from tests.cases import one_of
from tests.unit.consumer.test_backend import exported, make_backend, train

OWN = """
import torch

def adamw(parameters, *, lr):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, fused=True)

def momentum(parameters, *, lr):
    vectors = {"params": [p for p in parameters if p.dim() == 1], "lr": 3 * lr}
    return torch.optim.SGD([vectors, {"params": [p for p in parameters if p.dim() > 1]}], lr=lr, momentum=0.9)
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], OptimizerConfig]:
    """Return the settings with one of the functions of OWN."""
    (tmp_path / "own.py").write_text(OWN)
    return lambda name: OptimizerConfig(optimizer=f"{tmp_path / 'own.py'}:{name}", learning_rate=1e-2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_optimizer_of_the_users_own_steps_as_the_same_one_built_in(
    model_dir: Path, own: Callable[[str], OptimizerConfig], precision: str
) -> None:
    built_in, users = (
        make_backend(model_dir, precision=precision, optimizer=optimizer)
        for optimizer in (OptimizerConfig(weight_decay_exempt="none"), own("adamw"))
    )
    for backend in (built_in, users):
        train(backend)
        train(backend, learning_rate=3e-3)
    assert all(map(torch.equal, exported(built_in).values(), exported(users).values()))


@pytest.mark.parametrize("precision", one_of(2, ["bf16", "fp32"]))
def test_an_optimizer_of_the_users_own_goes_on_bit_for_bit_and_its_groups_keep_their_rates(
    model_dir: Path, tmp_path: Path, own: Callable[[str], OptimizerConfig], precision: str
) -> None:
    backend = make_backend(model_dir, precision=precision, optimizer=own("momentum"))
    train(backend)
    backend.save(tmp_path / "step-1", state={})
    resumed = make_backend(tmp_path / "step-1", precision=precision, optimizer=own("momentum"))
    resumed.restore(tmp_path / "step-1")
    for each in (backend, resumed):
        train(each, learning_rate=5e-3)
    assert all(map(torch.equal, exported(backend).values(), exported(resumed).values()))
    assert [group["lr"] for group in resumed.policy.torch_optimizer.param_groups] == [pytest.approx(0.015), 5e-3]


def test_the_checkpoint_of_another_optimizer_is_refused(
    model_dir: Path, tmp_path: Path, own: Callable[[str], OptimizerConfig]
) -> None:
    backend = make_backend(model_dir, optimizer=own("momentum"))
    train(backend)
    backend.save(tmp_path / "step-1", state={})
    with pytest.raises(ConfigError, match=r"holds the optimizer state momentum_buffer, .* exp_avg, exp_avg_sq, step;"):
        make_backend(tmp_path / "step-1").restore(tmp_path / "step-1")
    with pytest.raises(ConfigError, match="it holds no optimizer state"):
        make_backend(model_dir).restore(model_dir)


@pytest.mark.parametrize(("name", "precision"), one_of(3, ["adamw", "momentum"], ["fp32", "bf16"]))
def test_a_checkpoint_from_before_any_step_of_the_optimizer_resumes_bit_for_bit(
    model_dir: Path, tmp_path: Path, own: Callable[[str], OptimizerConfig], name: str, precision: str
) -> None:
    """As DAPO's first steps leave it where all groups were dropped."""
    optimizer = OptimizerConfig() if name == "adamw" else own(name)
    backend = make_backend(model_dir, precision=precision, optimizer=optimizer)
    backend.save(tmp_path / "step-1", state={})
    resumed = make_backend(tmp_path / "step-1", precision=precision, optimizer=optimizer)
    resumed.restore(tmp_path / "step-1")
    for each in (backend, resumed):
        train(each)
    assert all(map(torch.equal, exported(backend).values(), exported(resumed).values()))
