"""Run trainers of all roles with their memory on the device and elsewhere (--offload), and compare every bit."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.protocols import Role
from consumer.backend import Backend, make_backend
from consumer.backend_config import BackendConfig, ModelSource
from consumer.role_models import RoleModel
from consumer.tensor_offload import TensorOffload
from tests.backends import backend_config
from tests.integration.consumer.conftest import LAYOUTS, LEARNING_RATE, UNEVEN
from tests.integration.consumer.samples import cut, make_samples, to_mini_batch
from tests.integration.consumer.trainer_server import TIMEOUT_S

ALL = frozenset({"optimizer", "reference", "teacher", "old"})
FROZEN: tuple[Role, ...] = ("reference", "old", "teacher")
CPU = torch.device("cpu")


def squares(values: Tensor, entropy: Tensor, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A loss of the critic."""
    counted = micro_batch["loss_mask"]
    return ((values - 1.0).square() * counted).sum(), {}


def config_of(models: Path, layout: str, precision: str, offload: frozenset[str], directory: Path) -> BackendConfig:
    """A policy, a critic, a reference that moves, a policy before the update, and a teacher of another size."""
    config = backend_config(
        models / "policy",
        teacher_dir=models / ("teacher-bf16" if precision == "fp32" else "teacher"),
        value_dir=models / "policy",
        keeps_old_policy=True,
        precision=precision,
        offload=offload,
        offload_dir=directory,
        **(LAYOUTS | UNEVEN)[layout][1],
    )
    reference = ModelSource(directory=models / "policy", is_saved=True)
    return dataclasses.replace(config, models={**config.models, "reference": reference})


def num_bytes(tensors: Iterator[Tensor]) -> int:
    """Bytes of memory that tensors have; those of DTensors are their rows'."""
    local: Iterator[Any] = (getattr(each, "_local_tensor", each) for each in tensors)
    storages = [each.untyped_storage() for each in local]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages if storage.resizable()}.values())


def check_memory(backend: Backend, offload: frozenset[str], *, has_states: bool = False) -> None:
    """What is offloaded has no memory, and all else has; the optimizer's states are there from the first step on."""
    for role, model in backend.models.items():
        masters = [] if model.torch_optimizer is None else model.masters().values()
        held = num_bytes(iter([*model.memory.tensors(), *masters]))
        of_weights = num_bytes(iter([*model.module.parameters(), *model.module.buffers()]))
        if model.torch_optimizer is None:
            assert (held == 0) == (role in offload), (role, held)
        else:
            has_more = has_states and "optimizer" not in offload
            assert of_weights and (held > of_weights if has_more else held >= of_weights), (role, held, of_weights)
            assert "optimizer" not in offload or held == of_weights, (role, held, of_weights)


def live(make: Callable[[], Backend], directory: Path, offload: frozenset[str], *, again: bool) -> dict[str, Any]:
    """Two steps of policy and critic, whose reference and old policy follow, then a step of what was saved.

    Args:
        make: returns the backend, built from the checkpoint if there is one.
        directory: of the checkpoint.
        offload: what the backend offloads.
        again: whether all memory is given up between steps, as with --colocate.
    """
    backend, found = make(), {}
    for step in range(2):
        found |= {f"{step} {name}": value for name, value in step_of(backend, step, offload).items()}
        if again:
            give_up_all(backend, directory.parent, offload)
    backend.save(directory, state={"step": 2})
    check_memory(backend, offload, has_states=True)
    found |= {f"saved {name}": value for name, value in state_of(backend).items()}
    backend.close()
    resumed = make()
    resumed.restore(directory)
    check_memory(resumed, offload, has_states=True)
    found |= {f"resumed {name}": value for name, value in step_of(resumed, 2, offload).items()}
    resumed.close()
    return found


def step_of(backend: Backend, step: int, offload: frozenset[str]) -> dict[str, Any]:
    """A step of every trained model. Returns: scores, norms, and the state after it."""
    layout = backend.layout
    samples = make_samples(step)[layout.dp_rank :: layout.dp_size]
    micro_batches = cut(samples, per_micro_batch=2, packed=True)
    check_memory(backend, offload)
    if "old" in backend.models:
        backend.keep_old_policy()
    roles = [role for role in FROZEN if role in backend.models or role in backend._views]
    found: dict[str, Any] = {role: backend.score(micro_batches, role) for role in roles}
    loss: Any = PolicyLoss()
    if "teacher" in backend.models:
        hidden = backend.score(micro_batches, "teacher", "hidden")
        check_memory(backend, offload)
        if hidden:
            pairs = zip(micro_batches, hidden, strict=True)
            micro_batches = tuple(each.with_arrays(teacher_hidden=h.numpy()) for each, h in pairs)
        loss = DistilledLoss(loss=loss, direction="reverse", kl_coeff=0.5)
    found |= train(backend, micro_batches, step, loss)
    check_memory(backend, offload)
    if "reference" in backend.models:
        backend.move_reference(0.5)
        check_memory(backend, offload)
    return {**found, **state_of(backend)}


def train(backend: Backend, micro_batches: tuple[MicroBatch, ...], step: int, loss: Any) -> dict[str, Any]:
    batch, found = to_mini_batch(micro_batches, step=step), dict[str, Any]()
    losses: dict[Role, Any] = {"policy": loss, "value": squares}
    for role, loss_fn in losses.items():
        if role in backend.models:
            found[f"sums of {role}"] = backend.reduce_sums(backend.forward_backward(batch, loss_fn, role))
            found[f"norm of {role}"] = backend.optimizer_step(loss_scale=1 / 8, learning_rate=LEARNING_RATE, role=role)
    return found


def give_up_all(backend: Backend, directory: Path, offload: frozenset[str]) -> None:
    """As between two turns of the trainers (--colocate)."""
    kept = TensorOffload(device=CPU, directory=directory, flag="--colocate")
    kept.offload(each for model in backend.models.values() for each in model.memory.tensors())
    assert not num_bytes(each for model in backend.models.values() for each in model.memory.tensors())
    kept.onload()
    check_memory(backend, offload)


def state_of(backend: Backend) -> dict[str, Any]:
    """Copies of what this rank exports, and of all that it holds of its models."""
    found: dict[str, Any] = {f"exported {name}": weight.clone() for name, weight in backend.export_weights()}
    for role, model in backend.models.items():
        with model.memory.used("weights", "head", "optimizer"):
            found |= {f"{role} {name}": each for name, each in held_by(model).items()}
    return found


def held_by(model: RoleModel) -> dict[str, Tensor]:
    found = {name: part.detach().clone() for name, part in model.parameters.local.items()}
    if model.torch_optimizer is not None:
        for name, master in model.masters().items():
            state = model.torch_optimizer.state[master]
            found[f"master {name}"] = master.detach().clone()
            found |= {f"{kind} {name}": each.clone() for kind, each in state.items() if isinstance(each, Tensor)}
    return found


def assert_equal(left: Any, right: Any, where: str = "") -> None:
    """Bit for bit."""
    if isinstance(left, Tensor):
        assert torch.equal(left, right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for name, value in left.items():
            assert_equal(value, right[name], f"{where} {name}")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for number, value in enumerate(left):
            assert_equal(value, right[number], f"{where} {number}")
    else:
        assert left == right, where


# By name: what is offloaded, and whether all memory is given up between steps.
LIVES = {"plain": (frozenset[str](), False), "offloaded": (ALL, False), "turns": (ALL, True)}


def compare(rank: int, models: Path, out_dir: Path, layout: str, precision: str, others: Sequence[str]) -> None:
    """Check that other lives, offloaded and with turns or without, have the bits and the checkpoint of a plain one."""
    lives = {}
    for name in ("plain", *others):
        offload, again = LIVES[name]
        directory = out_dir / name
        directory.mkdir(exist_ok=True)
        checkpoint = directory / "step-2"

        def make(offload: frozenset[str] = offload, checkpoint: Path = checkpoint) -> Backend:
            config = config_of(models, layout, precision, offload, models)
            if checkpoint.is_dir():
                config = resumed(config, checkpoint)
            return make_backend(config, device=CPU, timeout_s=TIMEOUT_S)

        lives[name] = live(make, checkpoint, offload, again=again)
    for name in others:
        assert_equal(lives["plain"], lives[name], f"rank {rank}, {name}:")


def resumed(config: BackendConfig, checkpoint: Path) -> BackendConfig:
    """The models as a run takes them from its checkpoint."""
    saved: dict[Role, Path] = {"policy": checkpoint, "old": checkpoint}
    saved |= {"value": checkpoint / "value", "reference": checkpoint / "reference"}
    sources = {
        role: dataclasses.replace(source, directory=saved.get(role, source.directory))
        for role, source in config.models.items()
    }
    return dataclasses.replace(config, models=sources)
