"""Be one of the processes that divide an LM head in test_vocab_parallel.py: what each path computes with its rows."""

import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.logprob import token_logprobs
from coati_rl.ops.vocabulary_kl import vocabulary_kl_loss

PATHS = ("recompute", "fused", "reverse", "forward")  # the last two: the divergence from a teacher


def compute(inputs: dict, group: dist.ProcessGroup | None, *, chunk_elements: int) -> dict[str, dict[str, Tensor]]:
    """Values and gradients of all paths. Without a group the whole head is this process's."""
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    rows = slice(rank * len(inputs["weight"]) // size, (rank + 1) * len(inputs["weight"]) // size)
    tensors, loss_fn, dtype = inputs["tensors"], inputs["loss_fn"], inputs["dtype"]
    results = {}
    for path in PATHS:
        leaves = {"hidden": inputs["hidden"], "weight": inputs["weight"][rows], "bias": inputs["bias"][rows]}
        leaves = {name: leaf.to(dtype, copy=True).requires_grad_() for name, leaf in leaves.items()}
        settings = {"group": group, "chunk_elements": chunk_elements // size}
        values: dict[str, Tensor] = {}
        if path in ("reverse", "forward"):
            weight, bias = (inputs[name][rows].to(dtype) for name in ("teacher_weight", "teacher_bias"))
            its = {"teacher_hidden": inputs["teacher_hidden"], "teacher_weight": weight, "teacher_bias": bias}
            loss, sums = vocabulary_kl_loss(**leaves, arrays=tensors, **its, direction=path, **settings)
        elif path == "fused":
            loss, sums = fused_token_loss(**leaves, arrays=tensors, loss_fn=loss_fn, **settings)
        else:
            arrays = (tensors[name] for name in ("token_ids", "sources", "loss_mask", "temperature"))
            logprobs, entropy = token_logprobs(*leaves.values(), *arrays, **settings)
            loss, sums = loss_fn(logprobs, entropy, tensors)
            values = {"logprobs": logprobs.detach(), "entropy": entropy.detach()}
        (2.0 * loss).backward()
        values |= {"loss": loss.detach(), **sums}
        results[path] = values | {f"grad_{name}": leaf.grad for name, leaf in leaves.items()}
    return results


def run_rank(rank: int, world_size: int, directory: Path, cases: list[dict]) -> None:
    """Compute all cases with this rank's rows of the head; write them to DIRECTORY/RANK.pt, a dictionary a case."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    group = dist.new_group(list(range(world_size)))
    results = [compute(case, group, chunk_elements=case["chunk_elements"]) for case in cases]
    torch.save(results, directory / f"{rank}.pt")
    dist.destroy_process_group()
