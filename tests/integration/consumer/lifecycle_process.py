"""Run a trainer that scores, trains, exports, saves, resumes and refuses invalid inputs, and record the results.

The results and the checkpoint of a life go to OUT_DIR/LAYOUT-PRECISION-MODEL; a resume goes on from such a checkpoint.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.batch import MicroBatch
from coati_rl.checkpoint.directory import read_state
from coati_rl.errors import RunError
from coati_rl.protocols import Role
from consumer import checkpoint
from consumer.backend import Backend
from consumer.models.weight_history import WeightHistory
from consumer.objectives.policy_gradient import PolicyGradient
from consumer.optim.learning_rate import LearningRate
from consumer.tensor_offload import TensorOffload
from consumer.train_step import TrainStep
from consumer.weight_sync.rank_sender import make_manifest
from tests.integration.consumer.conftest import EVERY_LAYOUT, LEARNING_RATE
from tests.integration.consumer.samples import cut, make_samples, to_mini_batch
from tests.integration.consumer.trainer import make_trainer, whole_tensors


class Case(NamedTuple):
    """A life from the first step to the refusals."""

    layout: str
    precision: str
    model: str


class Resume(NamedTuple):
    """Identify a resume from another layout: (layout, precision, model, their layout, their precision)."""

    layout: str
    precision: str
    model: str
    from_layout: str
    from_precision: str


LOSS = PolicyLoss()  # without a penalty: the reference is scored here for its own sake
MODELS: tuple[Role, ...] = ("policy", "reference", "old")  # that a trainer of a run may hold
RECOMPUTED = ("pp2", "tp2_pp2")  # layouts with one layer a stage
WIRE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make(model_dir: Path, layout: str, precision: str, **settings: object) -> Backend:
    """With the model as its own reference, and checkpoints of several files, which ranks share out."""
    checkpoint.CheckpointWriter.__init__.__kwdefaults__["max_file_bytes"] = 50_000
    settings = {"reference_dir": model_dir, "wire_dtype": WIRE[precision], **EVERY_LAYOUT[layout][1], **settings}
    return make_trainer(model_dir, precision=precision, **settings)


def accumulate(backend: Backend, step: int) -> dict[str, float]:
    """The whole step's gradient. Returns: its sums over all ranks."""
    layout = backend.layout
    micro_batches = cut(make_samples(step)[layout.data_rank :: layout.num_data_ranks], per_micro_batch=2, packed=True)
    return backend.reduce_sums(backend.forward_backward(to_mini_batch(micro_batches, step=step), LOSS))


def train(backend: Backend, step: int) -> dict[str, float]:
    """Returns: the step's sums, and the norm."""
    sums = accumulate(backend, step)
    return {**sums, "norm": backend.optimizer_step(loss_scale=1 / 8, learning_rate=LEARNING_RATE)}


def state_of(backend: Backend) -> dict[str, dict[str, Tensor]]:
    """Of this stage, on its head: what is exported, and the float32 numbers that are stepped on."""
    exported = {name: weight.clone() for name, weight in backend.export_weights()}
    masters = {name: m.detach().clone() for name, m in whole_tensors(backend, backend.policy.masters()).items()}
    own = {info.name for info in backend.policy.infos if info.stage == backend.layout.stage}
    if not backend.layout.is_stage_head:
        return {"exported": {}, "masters": {}}
    return {"exported": exported, "masters": {name: master for name, master in masters.items() if name in own}}


def overflow(logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    return logprobs.sum() * float("inf"), {}


def full_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def refusals(backend: Backend, micro_batches: tuple[MicroBatch, ...], out_dir: Path) -> dict[str, str]:
    """Return this rank's errors: a disk error on the first rank, then on the last stage's head; a bad gradient."""
    (out_dir / "file").touch()
    messages = {}

    def attempt(name: str, call: Any) -> None:
        try:
            call()
        except RunError as error:
            messages[name] = str(error)

    attempt("begin", lambda: backend.save(out_dir / "file" / "step-1", state={}))
    save_file, is_failing = checkpoint.save_file, backend.layout.is_stage_head and backend.layout.is_last_stage
    checkpoint.save_file = full_disk if is_failing else save_file
    attempt("write", lambda: backend.save(out_dir / "step-9", state={}))
    checkpoint.save_file = save_file
    backend.forward_backward(to_mini_batch(micro_batches, step=0), overflow)
    attempt("step", lambda: backend.optimizer_step(loss_scale=1 / 8, learning_rate=LEARNING_RATE))
    return messages


def recomputed_gradients(model_dir: Path, layout: str, precision: str) -> dict[str, Any]:
    """The first step's gradient with and without gradient checkpointing, and how many layers were run for it."""
    found: dict[str, Any] = {}
    for is_on in (False, True):
        backend = make(model_dir, layout, precision, gradient_checkpointing=is_on, reference_dir=None)
        ran: list[Any] = []
        for layer in backend.policy.module.base_model.layers:
            if layer is not None:  # of this stage
                layer.register_forward_pre_hook(lambda layer, _: ran.append(layer))  # noqa: B023
        accumulate(backend, 0)
        backend.reduce_gradients()
        found[f"gradients, {is_on}"] = {name: gradient.clone() for name, gradient in backend.policy.gradients.items()}
        found[f"layers, {is_on}"] = len(ran)
        backend.close()
    return found


def scores_of(backend: Backend, micro_batches: Sequence[MicroBatch]) -> dict[str, list[Tensor]]:
    return {model: backend.score(micro_batches, model) for model in MODELS}


def take_empty_steps(backend: Backend) -> list[dict[str, Any]]:
    """A step without samples, and one whose samples do not count. Returns: what is reported of each."""
    empty = to_mini_batch((), step=2, scale=0.0)
    uncounted = to_mini_batch(cut(make_samples(2), per_micro_batch=4, packed=True), step=2, scale=0.0)
    train_step = TrainStep(backend, PolicyGradient(loss=LOSS), learning_rate=LearningRate(peak=LEARNING_RATE))
    return [train_step.run(batch) or {} for batch in (empty, uncounted)]


def live(out_dir: Path, layout: str, precision: str, model: str) -> dict[str, Any]:
    model_dir, directory = out_dir / model, out_dir / f"{layout}-{precision}-{model}"
    backend = make(model_dir, layout, precision, keeps_old_policy=True)
    micro_batches = cut(make_samples(0), per_micro_batch=4, packed=True)
    result: dict[str, Any] = {"stage": backend.layout.stage, "has_head": backend.layout.is_last_stage}
    result["scores"] = [scores_of(backend, micro_batches)]
    untrained = directory / "untrained" / "step-0"
    backend.save(untrained, state={"step": 0})  # before any optimizer step
    train(backend, 0)
    result["first_step"] = state_of(backend)
    result["scores"].append(scores_of(backend, micro_batches))
    backend.keep_old_policy()
    history = WeightHistory(backend.live_weights(), max_versions=1)
    history.keep(1)
    train(backend, 1)
    with history.swapped_in(1):
        result["kept"] = backend.score(micro_batches)
    result["scores"].append(scores_of(backend, micro_batches))
    result["saved"] = state_of(backend)
    result["manifest"] = [(entry.name, entry.shape, entry.sender) for entry in make_manifest(backend, 2).entries]
    result["buffers"] = {name: buffer.dtype for name, buffer in backend.policy.module.named_buffers()}

    backend.save(directory / "step-2", state={"step": 1})
    backend.save(directory / "step-2", state={"step": 2})  # replaces the first
    for step in (0, 1, 2):
        backend.save(directory / "kept" / f"step-{step}", state={"step": step}, keep=2, has_optimizer=False)
    result["empty_steps"], result["after_empty_steps"] = take_empty_steps(backend), state_of(backend)
    result["sums"], result["uninterrupted"] = train(backend, 2), state_of(backend)
    result["resumed_sums"], result["resumed"] = resume(directory / "step-2", layout, precision)
    _, result["first_step_of_resumed"] = resume(untrained, layout, precision, reference_dir=None)
    result["refusals"] = refusals(backend, micro_batches, directory)
    result["after_refusal"] = state_of(backend)
    backend.close()
    if layout in RECOMPUTED:
        result |= recomputed_gradients(model_dir, layout, precision)
    return result


def resume(
    saved: Path, layout: str, precision: str, *, again: Path | None = None, **settings: object
) -> tuple[dict[str, float], dict[str, dict[str, Tensor]]]:
    """Take the step after a checkpoint, with two turns of engines on the same devices between.

    `again`: where to save what was restored, before that.
    """
    backend = make(saved, layout, precision, **settings)
    backend.restore(saved)
    give_up_memory(backend, saved)
    if again is not None:
        backend.save(again, state=read_state(saved))
    sums = train(backend, read_state(saved)["step"])
    give_up_memory(backend, saved)
    state = state_of(backend)
    backend.close()
    return sums, state


def give_up_memory(backend: Backend, directory: Path) -> None:
    """As between two turns of the trainers."""
    kept = TensorOffload(device=backend.device, directory=directory, flag="--colocate")
    kept.offload(each for model in backend.models.values() for each in model.memory.tensors())
    # Frozen models may be maps of files, which cost nothing.
    trained = {n: getattr(each, "_local_tensor", each) for n, each in backend.policy.module.named_parameters()}
    masters = {f"master of {name}": each for name, each in backend.policy.masters().items()}
    held = {n: t.shape for n, t in {**trained, **masters}.items() if t.untyped_storage().nbytes()}
    assert not held and kept.num_bytes, held
    kept.onload()


def run_tasks(rank: int, out_dir: Path, tasks: Sequence[Case | Resume]) -> None:
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(os.getpid()).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    for task in tasks:
        layout, precision, model, *source = task
        if source:
            saved = out_dir / "-".join([*source, model])
            name = f"resumed-{layout}-{precision}"
            sums, state = resume(saved / "step-2", layout, precision, again=saved / name / "step-2")
            result = {"sums": sums, "state": state}
        else:
            saved, name = out_dir / "-".join([layout, precision, model]), "life"
            result = {**live(out_dir, layout, precision, model), "listening": listening}
        torch.save(result, saved / f"{name}-rank{rank}.pt")
