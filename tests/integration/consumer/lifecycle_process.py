"""A trainer that scores, trains, exports, saves, resumes and is given what it must refuse, and writes all that down.

lifecycle_process.py RANK WORLD_SIZE PORT LISTENER_FD OUT_DIR MODEL_DIR...
"""

import os
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from coati_rl.algorithms.grpo import GrpoLoss
from coati_rl.batch import MicroBatch
from coati_rl.errors import RunError
from consumer.checkpoint import load_state
from consumer.colossal_backend import ColossalBackend
from tests.integration.consumer.conftest import LEARNING_RATE, cut, make_samples, to_mini_batch
from tests.integration.consumer.trainer import join, make_backend

LOSS = GrpoLoss()  # without a penalty: the reference is scored here for its own sake


def train(backend: ColossalBackend, step: int, rank: int, world_size: int) -> None:
    micro_batches = cut(make_samples(step)[rank::world_size], per_micro_batch=2, packed=True)
    backend.forward_backward(to_mini_batch(micro_batches, step=step), LOSS)
    backend.optimizer_step(loss_scale=1 / 8, learning_rate=LEARNING_RATE)


def weights_of(backend: ColossalBackend) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in backend.export_weights()}


def logits_of(backend: ColossalBackend) -> Tensor:
    """float32[1, T, V] of a fixed text, through the bare model."""
    token_ids = torch.tensor(make_samples(0)[0].token_ids)[None]
    with torch.no_grad():
        hidden = backend.policy.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
        return backend.policy.get_output_embeddings()(hidden)


def refusals(backend: ColossalBackend, micro_batches: tuple[MicroBatch, ...], blocked: Path) -> dict[str, str]:
    def overflowing(
        logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return logprobs.sum() * float("inf"), {}

    messages = {}
    backend.forward_backward(to_mini_batch(micro_batches, step=0), overflowing)
    for name, call in {
        "step": lambda: backend.optimizer_step(loss_scale=1 / 8, learning_rate=LEARNING_RATE),
        "save": lambda: backend.save(blocked / "step-1", state={}),
    }.items():
        try:
            call()
        except RunError as error:
            messages[name] = str(error)
    return messages


def lifecycle(model_dir: Path, out_dir: Path, *, rank: int, world_size: int, precision: str) -> dict[str, Any]:
    settings = {"precision": precision, "reference_dir": model_dir}
    backend = make_backend(model_dir, **settings)
    result: dict[str, Any] = {}
    micro_batches = cut(make_samples(0), per_micro_batch=4, packed=True)
    result["scores"] = [backend.score(m, use_reference=False) for m in micro_batches]
    result["reference"] = [backend.score(m, use_reference=True) for m in micro_batches]
    for step in range(2):
        train(backend, step, rank, world_size)
    result["trained_scores"] = [backend.score(m, use_reference=False) for m in micro_batches]
    result["reference_afterwards"] = [backend.score(m, use_reference=True) for m in micro_batches]
    result["exported"], result["logits"] = weights_of(backend), logits_of(backend)
    result["buffers"] = {name: buffer.dtype for name, buffer in backend.policy.named_buffers()}
    result["masters"] = {name: master.detach().clone() for name, master in backend._masters().items()}

    checkpoint = out_dir / f"{model_dir.name}-{precision}" / "step-2"
    backend.save(checkpoint, state={"step": 1})
    backend.save(checkpoint, state={"step": 2})  # replaces the first
    train(backend, 2, rank, world_size)
    resumed = make_backend(checkpoint, **settings)
    resumed.restore_optimizer(checkpoint)
    train(resumed, load_state(checkpoint)["step"], rank, world_size)
    result["uninterrupted"], result["resumed"] = weights_of(backend), weights_of(resumed)

    blocked = out_dir / "file"
    blocked.touch()
    result["refusals"] = refusals(backend, micro_batches, blocked)
    result["after_refusal"] = weights_of(backend)
    return result


def main() -> None:
    """Every model in both precisions."""
    rank, world_size, (out_dir, *model_dirs) = join()
    listening = {
        connection.laddr.ip
        for connection in psutil.Process(os.getpid()).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    results: dict[Any, Any] = {"listening": listening}
    for model_dir in map(Path, model_dirs):
        for precision in ("fp32", "bf16"):
            results[model_dir.name, precision] = lifecycle(
                model_dir, Path(out_dir), rank=rank, world_size=world_size, precision=precision
            )
    torch.save(results, Path(out_dir) / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
