"""A trainer that takes two steps for every loss and way of cutting the same samples, and writes down their gradients.

gradient_process.py RANK WORLD_SIZE PORT LISTENER_FD OUT_DIR LAYOUT:PRECISION,... WHAT MODEL_DIR...

WHAT is "losses", all of them on the first model and all cuts of the first loss on the others; "cuts", those on every
model; or one of the FAULTS, which is put into the trainer of the first model to see that it would be noticed. A layout
of those that combine others is given the cuts alone, on the first model.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch
from coati_rl.data.packing import blank_micro_batch
from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.logprob import token_logprobs
from consumer import gradient_reduction
from consumer.colossal_backend import ColossalBackend
from tests.integration.consumer.conftest import (
    COMBINED,
    LAYOUTS,
    LEARNING_RATE,
    NUM_STEPS,
    VOCAB_SIZE,
    reference_of,
)
from tests.integration.consumer.gradient_faults import FAULTS
from tests.integration.consumer.losses import LOSSES, Cut, LossCase
from tests.integration.consumer.samples import Sample, cut, samples_near, scale_of, to_mini_batch
from tests.integration.consumer.trainer import join, make_backend, whole_tensors

Case = tuple[str, Cut]  # loss, and how its samples are cut


def cases_of(what: str, *, layout: str, is_first_model: bool) -> list[Case]:
    if what in FAULTS:
        loss = FAULTS[what][1]
        return [(loss, LOSSES[loss].cuts[0])]
    is_whole = what == "losses" and is_first_model and layout not in COMBINED
    losses = LOSSES if is_whole else ("clip", "clip, whole")
    return [(loss, cut) for loss in losses for cut in LOSSES[loss].cuts]


def mini_batches_of(samples: Sequence[Sample], split: str) -> list[Sequence[Sample]]:
    """In an uneven split there are fewer samples in the last one than data-parallel ranks."""
    if split == "uneven":
        return [samples[:7], samples[7:]]
    return [samples] if split == "one" else [samples[:2], samples[2:6], samples[6:]]


def share_of(samples: Sequence[Sample], backend: ColossalBackend, loss: LossCase, how: Cut) -> list[MicroBatch]:
    """A rank's micro-batches; all ranks have equally many."""
    layout = backend.layout
    count = -(-len(samples[:: layout.dp_size]) // how.size)  # of rank 0, which has the most samples
    mine = samples[layout.dp_rank :: layout.dp_size]
    micro_batches = cut(mine, per_micro_batch=how.size, packed=how.packed, aggregation=loss.aggregation)
    return [*micro_batches] + [blank_micro_batch()] * (count - len(micro_batches))


def steps_of(backend: ColossalBackend, model_dir: Path, loss: LossCase, how: Cut) -> Iterator[dict[str, Any]]:
    for step in range(NUM_STEPS):
        samples = samples_near(model_dir, step, recomputes_old=loss.recomputes_old)
        scale, sums = scale_of(samples, loss.aggregation), dict[str, Tensor]()
        mini_batches = mini_batches_of(samples, how.split)
        for index, part in enumerate(mini_batches):
            micro_batches = with_reference(backend, share_of(part, backend, loss, how))
            is_last = index == len(mini_batches) - 1
            batch = to_mini_batch(micro_batches, step=step, is_last=is_last)
            sums = merge_sums(sums, backend.forward_backward(batch, loss.loss_fn))
        gradients = whole_tensors(backend, backend.gradients)
        gradients = {name: gradient * scale for name, gradient in gradients.items()}
        before = {name: p.detach().clone() for name, p in backend.parameters.by_name.items()}
        norm = backend.optimizer_step(loss_scale=scale, learning_rate=LEARNING_RATE)
        after = {name: p.detach() for name, p in backend.parameters.by_name.items()}
        updates = {name: backend.parameters.full(name, p - before[name]) for name, p in after.items()}
        yield {
            "gradients": gradients if backend.layout.is_stage_head else {},
            "updates": updates if backend.layout.is_stage_head else {},
            "masters": whole_masters(backend) if step == NUM_STEPS - 1 else {},
            "norm": norm,
            "sums": backend.reduce_sums(sums),
            "loss_scale": scale,
            "weights": {
                name: xxhash.xxh3_128_hexdigest(weight.contiguous().view(torch.uint8).numpy())
                for name, weight in after.items()
            },
        }


def whole_masters(backend: ColossalBackend) -> dict[str, Tensor]:
    """What the optimizer has made of the weights, in float32."""
    masters = whole_tensors(backend, {name: m.detach() for name, m in backend._masters().items()})
    return {name: m.clone() for name, m in masters.items()} if backend.layout.is_stage_head else {}


def with_reference(backend: ColossalBackend, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """A pass without gradient in between, as in training."""
    if backend.config.reference_dir is None:
        return micro_batches
    scores = backend.score(micro_batches, "reference")
    if not scores:
        return micro_batches
    pairs = zip(micro_batches, scores, strict=True)
    return [dataclasses.replace(micro_batch, ref_logprobs=score.numpy()) for micro_batch, score in pairs]


def train(model_dir: Path, layout: str, precision: str, cases: Sequence[Case]) -> dict[Any, Any]:
    """Loss and cut to its steps."""
    results: dict[Any, Any] = {}
    for name, how in cases:
        loss = LOSSES[name]
        backend = make_backend(
            model_dir,
            reference_dir=reference_of(model_dir) if loss.loss.kl_coeff > 0 else None,
            precision=precision,
            **LAYOUTS[layout][1],
        )
        if backend.layout.is_partitioned:
            backend._optimizer._reduce_bucket_size = 1000  # were ZeRO's own hooks at work, they would cut in now
        results[name, *how] = list(steps_of(backend, model_dir, loss, how))
        backend.close()
    results["layout"] = (backend.layout.dp_rank, backend.layout.stage, backend.layout.tp_rank)
    results["replicated"] = sorted(name for name, info in backend.parameters.infos.items() if info.split_dim is None)
    return results


def main() -> None:
    """Every model in every layout and precision."""
    rank, _, (out_dir, runs, what, *model_dirs) = join()
    gradient_reduction.BUCKET_ELEMENTS = 5000  # some parameters fill a bucket together, some are larger than one
    for evaluate in (fused_token_loss, token_logprobs):
        evaluate.__kwdefaults__["chunk_elements"] = 8 * VOCAB_SIZE  # many responses are longer than a chunk
    if what in FAULTS:
        FAULTS[what][0]()
    for index, model_dir in enumerate(map(Path, model_dirs)):
        for run in runs.split(","):
            layout, precision = run.split(":")
            if layout in COMBINED and index > 0:
                continue
            cases = cases_of(what, layout=layout, is_first_model=index == 0)
            results = train(model_dir, layout, precision, cases)
            torch.save(results, Path(out_dir) / f"{layout}-{precision}-{model_dir.name}-rank{rank}.pt")


if __name__ == "__main__":
    main()
