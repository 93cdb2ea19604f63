"""Run a trainer that takes the steps of each case of the gradient matrix, and records its state."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.batching.packing import blank_micro_batch
from coati_rl.ops.fused_loss import fused_token_loss
from coati_rl.ops.logprob import token_logprobs
from consumer.backend import Backend
from consumer.models import context_attention, context_cut, path_attention
from consumer.optim.learning_rate import LearningRate
from consumer.parallel import gradient_reduction
from consumer.parallel.parameters import ParameterInfo
from consumer.train_step import TrainStep
from tests.integration.consumer.conftest import EVERY_LAYOUT, LEARNING_RATE, NUM_STEPS, VOCAB_SIZE, reference_of
from tests.integration.consumer.gradient_matrix import CASES, Run, Trial
from tests.integration.consumer.losses import Cut, LossCase
from tests.integration.consumer.preference_losses import UnitCase
from tests.integration.consumer.samples import Sample, cut, samples_near, scale_of, to_mini_batch
from tests.integration.consumer.shared_samples import shared_micro_batches
from tests.integration.consumer.trainer import make_trainer

NUM_SCORED = 5  # samples that are scored in float32, too, in two micro-batches


def mini_batches_of(samples: Sequence[Sample], split: str, unit: int) -> list[Sequence[Sample]]:
    """In an uneven split there is one unit in the last one: fewer than data-parallel ranks."""
    if split == "uneven":
        return [samples[:-unit], samples[-unit:]]
    return [samples] if split == "one" else [samples[:2], samples[2:6], samples[6:]]


def share_of(samples: Sequence[Sample], backend: Backend, loss: LossCase | UnitCase, how: Cut) -> list[MicroBatch]:
    """A rank's micro-batches; all ranks have equally many."""
    layout, unit = backend.layout, loss.unit
    if how.shared:
        ranks = shared_micro_batches(
            samples, size=how.size * unit, unit=unit, num_ranks=layout.num_data_ranks, aggregation=loss.aggregation
        )
        return [*ranks[layout.data_rank]]
    units = [samples[start : start + unit] for start in range(0, len(samples), unit)]
    count = -(-len(units[:: layout.num_data_ranks]) // how.size)  # of rank 0, which has the most samples
    mine = [sample for each in units[layout.data_rank :: layout.num_data_ranks] for sample in each]
    micro_batches = cut(mine, per_micro_batch=how.size * unit, packed=how.packed, aggregation=loss.aggregation)
    return [*micro_batches] + [blank_micro_batch()] * (count - len(micro_batches))


def steps_of(
    backend: Backend, model_dir: Path, loss: LossCase | UnitCase, how: Cut, num_steps: int = NUM_STEPS
) -> Iterator[dict[str, Any]]:
    for step in range(num_steps):
        recorder = StepRecorder(backend)
        scale = take_whole_step(recorder, model_dir, loss, how, step)
        weights = {name: p.detach() for name, p in backend.policy.parameters.local.items()}
        yield {
            **recorder.taken,
            "masters": {name: master.detach().clone() for name, master in backend.policy.masters().items()},
            "loss_scale": scale,
            "weights": digests_of(backend, weights) if step == num_steps - 1 else {},
        }


def take_whole_step(recorder: Any, model_dir: Path, loss: LossCase | UnitCase, how: Cut, step: int) -> float:
    """Returns: the factor of the loss."""
    samples = samples_near(model_dir, step, recomputes_old=loss.recomputes_old, kind=loss.kind)
    scale = scale_of(samples, loss.aggregation) * loss.unit
    parts = [share_of(part, recorder, loss, how) for part in mini_batches_of(samples, how.split, loss.unit)]
    batches = [
        to_mini_batch(part, step=step, is_last=number == len(parts), scale=scale)
        for number, part in enumerate(parts, 1)
    ]
    if isinstance(loss, UnitCase):
        train_step = TrainStep(recorder, loss.objective, learning_rate=LearningRate(peak=LEARNING_RATE))
        for batch in batches:
            train_step.run(batch)
    else:
        take_step(recorder, loss, batches)
    return scale


class StepRecorder:
    """A backend that keeps the gradient and the norm of the step, and the sums that were reduced last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.taken: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def optimizer_step(self, *, loss_scale: float, **settings: Any) -> float:
        self._backend.reduce_gradients()
        gradients = self._backend.policy.gradients.items()
        self.taken["gradients"] = {name: gradient * loss_scale for name, gradient in gradients}
        self.taken["norm"] = self._backend.optimizer_step(loss_scale=loss_scale, **settings)
        return self.taken["norm"]

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        self.taken["sums"] = self._backend.reduce_sums(sums)
        return self.taken["sums"]


def take_step(backend: Any, loss: LossCase, batches: Sequence[MiniBatch]) -> None:
    sums: dict[str, Tensor] = {}
    for batch in batches:
        if loss.has_reference:
            batch = dataclasses.replace(batch, micro_batches=with_reference(backend, batch.micro_batches))
        sums = merge_sums(sums, backend.forward_backward(batch, loss.loss_fn))
    backend.optimizer_step(loss_scale=batches[-1].loss_scale, learning_rate=LEARNING_RATE)
    backend.reduce_sums(sums)


def digests_of(backend: Backend, weights: dict[str, Tensor]) -> dict[tuple[str, int | None, int | None], str]:
    """By name and, of a weight that is cut over tensor ranks or over copies, this one's."""
    copy = backend.layout.fsdp_rank if backend.layout.zero_stage == 3 else None
    is_cut = {name: info.split_dim is not None for name, info in backend.policy.parameters.infos.items()}
    return {
        (name, backend.layout.tp_rank if is_cut[name] else None, copy): xxhash.xxh3_128_hexdigest(
            weight.contiguous().view(torch.uint8).cpu().numpy()
        )
        for name, weight in weights.items()
    }


def shards_of(backend: Backend) -> dict[str, tuple[tuple[int, ...], int | None]]:
    """The shape of this tensor rank's part of each parameter, and along which dimension it was cut."""
    infos, tp_size = backend.policy.parameters.infos, backend.layout.tp_size

    def shape(info: ParameterInfo) -> tuple[int, ...]:
        return tuple(size // (tp_size if dim == info.split_dim else 1) for dim, size in enumerate(info.shape))

    return {name: (shape(info), info.split_dim) for name, info in infos.items()}


def with_reference(backend: Backend, micro_batches: Sequence[MicroBatch]) -> tuple[MicroBatch, ...]:
    """A pass without gradient in between, as in training."""
    scores = backend.score(micro_batches, "reference")
    if not scores:
        return tuple(micro_batches)
    pairs = zip(micro_batches, scores, strict=True)
    return tuple(micro_batch.with_arrays(ref_logprobs=score.cpu().numpy()) for micro_batch, score in pairs)


class Restarts:
    """Takes a backend back to the weights that it started from, as building another takes longer than two steps."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._start = [tensor.clone() for tensor in self._tensors()]

    def restart(self) -> None:
        with torch.no_grad():
            for tensor, start in zip(self._tensors(), self._start, strict=True):
                tensor.copy_(start)
        self._backend.policy.torch_optimizer.state.clear()

    def _tensors(self) -> list[Tensor]:
        """Weights, and what is stepped on in their place; those may be the same."""
        backend = self._backend
        return [
            tensor.detach()
            for tensor in (*backend.policy.parameters.local.values(), *backend.policy.masters().values())
        ]


def take_trials(
    rank: int,
    out_dir: Path,
    model_root: Path,
    runs: Sequence[tuple[Run, Sequence[Trial]]],
    fault: Callable[[], None] | None = None,
) -> None:
    """Write down what this rank holds of the results of each run. `fault` is put into the trainer first."""
    gradient_reduction.BUCKET_ELEMENTS = 5000  # some parameters fill a bucket together, some are larger than one
    # Queries in several blocks, one head of keys at a time, and rows of both few and many chunks.
    path_attention.QUERY_BLOCK, context_cut.LONG_CHUNK = 5, 24
    context_attention.GATHERED_ELEMENTS["cpu"] = 1
    for evaluate in (fused_token_loss, token_logprobs):
        evaluate.__kwdefaults__["chunk_elements"] = 12 * VOCAB_SIZE  # many responses are longer than a chunk
    if fault is not None:
        fault()
    for run, trials in runs:
        results: dict[Any, Any] = {}
        for model, of_model in itertools.groupby(trials, lambda trial: trial.model):
            backend = make_trained(model_root / model, run)
            results["place"] = (backend.layout.dp_rank, backend.layout.stage, backend.layout.tp_rank)
            results[model, "shards"] = shards_of(backend)
            if run.precision == "bf16":
                parts = cut(samples_near(model_root / model, 0)[:NUM_SCORED], per_micro_batch=3, packed=True)
                results[model, "scores"] = (backend.score(parts), backend.score_float32(parts))
            restarts = Restarts(backend)
            for trial in of_model:
                restarts.restart()
                steps = steps_of(backend, model_root / model, CASES[trial.loss], trial.cut, trial.num_steps)
                results[model, trial.loss, tuple(trial.cut), trial.num_steps] = list(steps)
            backend.close()
        torch.save(results, out_dir / f"{run.layout}-{run.precision}-rank{rank}.pt")


def make_trained(model_dir: Path, run: Run) -> Backend:
    backend = make_trainer(
        model_dir, reference_dir=reference_of(model_dir), precision=run.precision, **EVERY_LAYOUT[run.layout][1]
    )
    if backend.layout.zero_stage in (1, 2):
        backend.policy._sharded._boosted._reduce_bucket_size = (
            1000  # were ZeRO's own hooks at work, they would cut in now
        )
    return backend
