"""A trainer that takes two steps for every way of cutting the same samples, and writes down each step's gradient.

gradient_process.py RANK WORLD_SIZE PORT LISTENER_FD OUT_DIR MODEL_DIR...
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from coati_rl.batch import MicroBatch
from consumer.colossal_backend import ColossalBackend
from tests.integration.consumer.conftest import (
    LEARNING_RATE,
    LOSS,
    NUM_STEPS,
    Sample,
    cut,
    make_samples,
    to_mini_batch,
)
from tests.integration.consumer.trainer import join, make_backend

Share = Sequence[Sequence[Sample]]  # a rank's samples, mini-batch by mini-batch

SIZES = (1, 2, 4)  # samples per micro-batch
SPLITS = ("one", "several", "uneven")  # mini-batches of a step


def share_of(samples: Sequence[Sample], split: str, *, rank: int, world_size: int) -> Share:
    """A rank's mini-batches; in an uneven split the last rank has nothing in the last one, and fewer in all."""
    if split == "uneven":
        first, rest = samples[:6], samples[6:]
        return [first[rank::world_size], rest if rank == 0 else []]
    mine = samples[rank::world_size]
    return [mine] if split == "one" else [mine[:1], mine[1:3], mine[3:]]


def steps_of(backend: ColossalBackend, shares: Sequence[Share], *, size: int, packed: bool) -> Iterator[dict[str, Any]]:
    for step, share in enumerate(shares):
        for index, samples in enumerate(share):
            micro_batches = [with_reference(backend, m) for m in cut(samples, per_micro_batch=size, packed=packed)]
            is_last = index == len(share) - 1
            sums = backend.forward_backward(to_mini_batch(micro_batches, step=step, is_last=is_last), LOSS)
        gradients = {name: p.grad.clone() for name, p in backend.policy.named_parameters()}
        before = {name: p.detach().clone() for name, p in backend.policy.named_parameters()}
        norm = backend.optimizer_step(loss_scale=1 / 8, learning_rate=LEARNING_RATE)
        updates = {name: p.detach() - before[name] for name, p in backend.policy.named_parameters()}
        yield {"gradients": gradients, "norm": norm, "updates": updates, "keys": sorted(sums)}


def with_reference(backend: ColossalBackend, micro_batch: MicroBatch) -> MicroBatch:
    """A pass without gradient in between, as in training."""
    scores = backend.score(micro_batch, use_reference=True).numpy()
    return dataclasses.replace(micro_batch, ref_logprobs=scores)


def main() -> None:
    """Every case on every model."""
    rank, world_size, (out_dir, *model_dirs) = join()
    results = {}
    for model_dir, split, size, packed in itertools.product(map(Path, model_dirs), SPLITS, SIZES, (True, False)):
        backend = make_backend(model_dir)
        shares = [share_of(make_samples(s), split, rank=rank, world_size=world_size) for s in range(NUM_STEPS)]
        results[model_dir.name, split, size, packed] = list(steps_of(backend, shares, size=size, packed=packed))
        backend.close()
    torch.save(results, Path(out_dir) / f"rank{rank}of{world_size}.pt")


if __name__ == "__main__":
    main()
