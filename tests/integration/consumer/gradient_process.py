"""A trainer that takes two steps for every way of cutting the same samples, and writes down each step's gradient.

gradient_process.py RANK WORLD_SIZE PORT LISTENER_FD OUT_DIR LAYOUT:PRECISION,... MODEL_DIR... [FAULT]

A FAULT is put into the trainer to see that it would be noticed.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from coati_rl.batch import MicroBatch
from coati_rl.data.packing import blank_micro_batch
from coati_rl.protocols import LossFn
from consumer import gradient_reduction, torch_backend
from consumer.colossal_backend import ColossalBackend
from consumer.parameters import ParameterInfo
from tests.integration.consumer.conftest import (
    LAYOUTS,
    LEARNING_RATE,
    LOSS,
    NUM_STEPS,
    ON_ONE_MODEL,
    Sample,
    Unseparated,
    cut,
    make_samples,
    to_mini_batch,
)
from tests.integration.consumer.trainer import join, make_backend, whole_tensors

SIZES = (1, 2, 4)  # samples per micro-batch
SPLITS = ("one", "several", "uneven")  # mini-batches of a step
CUTS = [  # (samples per micro-batch, packed, mini-batches, loss)
    (size, packed, SPLITS[index % len(SPLITS)], "fused")
    for index, (packed, size) in enumerate(itertools.product((True, False), SIZES))
]
CUTS += [(2, True, "uneven", "recomputed"), (2, False, "one", "recomputed")]
LOSSES: dict[str, LossFn] = {"fused": LOSS, "recomputed": Unseparated(LOSS)}


def wrong_denominator() -> None:
    """The average over data-parallel copies that DDP would form."""
    right = gradient_reduction._sum_in_place

    def averaging(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
        right(gradients, group)
        for gradient in gradients:
            gradient /= dist.get_world_size(group)

    gradient_reduction._sum_in_place = averaging


def dropped_q_norm_sum() -> None:
    """What transformers' plan calls replicated_with_grad_allreduce is taken for plainly replicated."""
    described = torch_backend.describe_parameters

    def forgetful(*arguments: Any) -> tuple[ParameterInfo, ...]:
        return tuple(dataclasses.replace(info, is_partial=False) for info in described(*arguments))

    torch_backend.describe_parameters = forgetful


def undivided_pipeline() -> None:
    """The scheduler's division by the number of micro-batches stays."""
    right = ColossalBackend._run_pipeline

    def divided(backend: ColossalBackend, model: Any, inputs: Sequence[Any], criterion: Any) -> None:
        def without_factor(output: Any, batch: Any) -> Tensor:
            return criterion(output, batch) / len(inputs)

        right(backend, model, inputs, without_factor)

    ColossalBackend._run_pipeline = divided


FAULTS = {fault.__name__: fault for fault in (wrong_denominator, dropped_q_norm_sum, undivided_pipeline)}


def mini_batches_of(samples: Sequence[Sample], split: str) -> list[Sequence[Sample]]:
    """In an uneven split there are fewer samples in the last one than data-parallel ranks."""
    if split == "uneven":
        return [samples[:7], samples[7:]]
    return [samples] if split == "one" else [samples[:2], samples[2:6], samples[6:]]


def share_of(samples: Sequence[Sample], backend: ColossalBackend, *, size: int, packed: bool) -> list[MicroBatch]:
    """A rank's micro-batches; all ranks have equally many."""
    layout = backend.layout
    count = -(-len(samples[:: layout.dp_size]) // size)  # of rank 0, which has the most samples
    mine = [*cut(samples[layout.dp_rank :: layout.dp_size], per_micro_batch=size, packed=packed)]
    return mine + [blank_micro_batch()] * (count - len(mine))


def steps_of(
    backend: ColossalBackend, samples: Sequence[Sequence[Sample]], loss: LossFn, *, size: int, packed: bool, split: str
) -> Iterator[dict[str, Any]]:
    for step in range(NUM_STEPS):
        mini_batches = mini_batches_of(samples[step], split)
        for index, part in enumerate(mini_batches):
            micro_batches = with_reference(backend, share_of(part, backend, size=size, packed=packed))
            is_last = index == len(mini_batches) - 1
            sums = backend.forward_backward(to_mini_batch(micro_batches, step=step, is_last=is_last), loss)
        gradients = {name: gradient.clone() for name, gradient in whole_tensors(backend, backend.gradients).items()}
        before = {name: p.detach().clone() for name, p in backend.parameters.by_name.items()}
        norm = backend.optimizer_step(loss_scale=1 / 8, learning_rate=LEARNING_RATE)
        after = {name: p.detach() for name, p in backend.parameters.by_name.items()}
        updates = {name: backend.parameters.full(name, p - before[name]) for name, p in after.items()}
        yield {
            "gradients": gradients if backend.layout.is_stage_head else {},
            "updates": updates if backend.layout.is_stage_head else {},
            "masters": whole_masters(backend),
            "norm": norm,
            "keys": sorted(sums),
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
    scores = backend.score(micro_batches, use_reference=True)
    if not scores:
        return micro_batches
    pairs = zip(micro_batches, scores, strict=True)
    return [dataclasses.replace(micro_batch, ref_logprobs=score.numpy()) for micro_batch, score in pairs]


def train(model_dir: Path, samples: Sequence[Sequence[Sample]], layout: str, precision: str) -> dict[Any, Any]:
    """Every cut of a model: (samples per micro-batch, packed, mini-batches, loss) to its steps."""
    results: dict[Any, Any] = {}
    for size, packed, split, loss in CUTS:
        backend = make_backend(model_dir, precision=precision, **LAYOUTS[layout][1])
        if backend.layout.is_partitioned:
            backend._optimizer._reduce_bucket_size = 1000  # were ZeRO's own hooks at work, they would cut in now
        steps = list(steps_of(backend, samples, LOSSES[loss], size=size, packed=packed, split=split))
        results[size, packed, split, loss] = steps
        backend.close()
    results["layout"] = (backend.layout.dp_rank, backend.layout.stage, backend.layout.tp_rank)
    results["replicated"] = sorted(name for name, info in backend.parameters.infos.items() if info.split_dim is None)
    return results


def main() -> None:
    """Every model in every layout and precision."""
    rank, _, (out_dir, runs, *model_dirs) = join()
    gradient_reduction.BUCKET_ELEMENTS = 5000  # some parameters fill a bucket together, some are larger than one
    if model_dirs[-1] in FAULTS:
        FAULTS[model_dirs.pop()]()
    for model_dir in map(Path, model_dirs):
        samples = [make_samples(step, model_dir) for step in range(NUM_STEPS)]
        for run in runs.split(","):
            layout, precision = run.split(":")
            if layout in ON_ONE_MODEL and model_dir.name != Path(model_dirs[0]).name:
                continue
            results = train(model_dir, samples, layout, precision)
            torch.save(results, Path(out_dir) / f"{layout}-{precision}-{model_dir.name}-rank{rank}.pt")


if __name__ == "__main__":
    main()
