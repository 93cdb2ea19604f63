"""Run one rank of `layout`: `python -m consumer.proofs.layout_trial MODEL STORE -tp|-pp PLUGIN RANK`.

Prints one JSON object as its last line: {"difference": in units of the tolerance, "text": of the largest one}, or
{"error": text}.
"""

import json
import logging
import random
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from coati_rl.batch import MiniBatch
from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.config.trainers import PluginName
from coati_rl.preflight.tiny_model import FIRST_TOKEN
from consumer.backend import Backend, make_backend
from consumer.backend_config import BackendConfig, trained
from consumer.objectives.own_loss import OwnLoss
from consumer.proofs.samples import TOLERANCE, SamplePart, micro_batch_of, plain_values

_RANKS = 2
_TIMEOUT_S = 120.0
_GRADIENT_TOLERANCE = 1e-3  # relative to the largest element of a tensor's gradient
_SMALL = 1e-3  # of a tensor with smaller gradients, relative to the model's largest: it is taken as that large
_LENGTHS = (11, 8)  # tokens of the samples


def _weighted_sum(logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]) -> Tensor:
    """Weigh each token's log-probability by another number, so that no two tensors' errors cancel."""
    return -(logprobs * weights_of(logprobs.shape[-1]) * micro_batch["loss_mask"]).sum()


def weights_of(number: int) -> Tensor:
    """Return float32[number] weights of tokens."""
    return torch.sin(torch.arange(1, number + 1, dtype=torch.float32))


def trial(model_dir: Path, flag: str, plugin: PluginName, rank: int) -> tuple[float, str]:
    """Return the largest difference of this rank, in units of the tolerance, and a text about it."""
    is_tensor_parallel = flag == "-tp"
    config = BackendConfig(
        models={"policy": trained(model_dir, OptimizerConfig(max_grad_norm=1e9))},
        plugin=plugin,
        tp_size=_RANKS if is_tensor_parallel else 1,
        pp_size=1 if is_tensor_parallel else _RANKS,
    )
    backend = make_backend(config, device=torch.device("cpu"), timeout_s=_TIMEOUT_S)
    plain = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokens = range(FIRST_TOKEN, plain.config.get_text_config().vocab_size)
    samples = [tuple(random.Random(length).choices(tokens, k=length)) for length in _LENGTHS]
    rows = [[SamplePart(token_ids=sample)] for sample in samples]  # a row each: packing is another proof's subject
    batch, _ = micro_batch_of(rows)
    scores = backend.score([batch])
    step = MiniBatch(step=0, micro_batches=(batch,), is_last=True, loss_scale=1.0, learning_rate_progress=0.0)
    backend.forward_backward(step, OwnLoss(_weighted_sum))
    backend.reduce_gradients()
    values = [plain_values(plain, sample) for sample in samples]
    torch.stack([-(each * weights_of(len(each))).sum() for each in values]).sum().backward()
    found = [of_gradients(backend, plain, rank)]
    if scores:
        gap = max((row[: len(want)] - want).abs().max().item() for row, want in zip(scores[0], values, strict=True))
        found.append((gap / TOLERANCE, f"log-probabilities differ by {gap:.2g} nats when it is cut"))
    return max(found)


def of_gradients(backend: Backend, plain: Any, rank: int) -> tuple[float, str]:
    """Return the largest difference of this rank's parts of gradients from plain ones; see `trial`."""
    reference = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    largest = max(gradient.abs().max().item() for gradient in reference.values())
    worst = (0.0, "")
    for name, gradient in backend.policy.gradients.items():
        info, whole = backend.policy.parameters.infos[name], reference.get(name)
        whole = torch.zeros(info.shape) if whole is None else whole
        mine = (
            whole
            if info.split_dim is None or backend.layout.tp_size == 1
            else whole.chunk(_RANKS, info.split_dim)[rank]
        )
        if mine.shape != gradient.shape:
            return float("inf"), f"the gradient of {name} has another shape than its shard"
        scale = max(whole.abs().max().item(), _SMALL * largest)
        error = (gradient - mine).abs().max().item() / scale
        worst = max(
            worst, (error / _GRADIENT_TOLERANCE, f"the gradient of {name} is off by {error:.1%} when it is cut")
        )
    return worst


def main(model_dir: str, store: str, flag: str, plugin: PluginName, rank: str) -> None:
    """Take part as this rank, and print what was found."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=int(rank),
        world_size=_RANKS,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    try:
        difference, text = trial(Path(model_dir), flag, plugin, int(rank))
        found: dict[str, Any] = {"difference": difference, "text": text}
    except Exception as error:  # noqa: BLE001  an architecture that cannot be cut fails anywhere
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
