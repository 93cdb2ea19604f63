"""Run a trainer that takes two steps with each reward objective, in several ways of cutting a step."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MiniBatch
from coati_rl.batching.packing import build_micro_batches, plan_batches
from coati_rl.samples import Sample
from consumer.backend import Backend
from tests.integration.consumer.conftest import EVERY_LAYOUT, LEARNING_RATE, NUM_STEPS
from tests.integration.consumer.gradient_process import Restarts, shards_of
from tests.integration.consumer.reward_cases import CASES, RewardCase
from tests.integration.consumer.trainer import make_trainer


class RewardCut(NamedTuple):
    """How the samples of a step are executed."""

    size: int  # samples per micro-batch
    packed: bool  # in one row; else one per row
    num_mini_batches: int


CUTS = (RewardCut(2, True, 1), RewardCut(6, True, 2), RewardCut(4, False, 1), RewardCut(14, True, 1))


def mini_batches_of(case: RewardCase, samples: Sequence[Sample], cut: RewardCut, backend: Backend) -> Iterator[Any]:
    """This rank's micro-batches of each mini-batch; the last one holds one unit, so that a rank may have none."""
    unit, layout = case.objective.unit, backend.layout
    border = len(samples) - unit if cut.num_mini_batches == 2 else 0
    for part in (samples[:border], samples[border:]) if border else (samples,):
        ranks = plan_batches(
            part, num_ranks=layout.num_data_ranks, max_samples=cut.size, one_sample_per_row=not cut.packed, unit=unit
        )
        ragged, plan = ranks[layout.data_rank]
        yield build_micro_batches(ragged, plan, one_sample_per_row=not cut.packed)


def steps_of(backend: Backend, case: RewardCase, cut: RewardCut) -> Iterator[dict[str, Any]]:
    for step in range(NUM_STEPS):
        samples = case.samples(step)
        scale, sums = 1 / case.denominator(samples), dict[str, Tensor]()
        parts = [case.objective.targets(part)[0] for part in mini_batches_of(case, samples, cut, backend)]
        for number, micro_batches in enumerate(parts):
            batch = MiniBatch(
                step=step,
                micro_batches=micro_batches,
                is_last=number == len(parts) - 1,
                loss_scale=scale,
                learning_rate_progress=0.0,
            )
            sums = merge_sums(sums, backend.forward_backward(batch, case.objective.losses["policy"]))
        backend.reduce_gradients()
        gradients = {name: gradient * scale for name, gradient in backend.policy.gradients.items()}
        norm = backend.optimizer_step(loss_scale=scale, learning_rate=LEARNING_RATE)
        reduced = backend.reduce_sums(sums)
        yield {
            "gradients": gradients,
            "masters": {name: master.detach().clone() for name, master in backend.policy.masters().items()},
            "norm": norm,
            "metrics": case.objective.metrics(reduced, loss_scale=scale) if reduced else {},
        }


def take_reward_steps(rank: int, out_dir: Path, model_dir: Path, layouts: Sequence[tuple[str, str]]) -> None:
    """Write down what this rank holds of the results of each (layout, precision)."""
    for layout, precision in layouts:
        results: dict[Any, Any] = {}
        for name, case in CASES.items():
            directory = model_dir if case.head is not None else model_dir / "lm"
            backend = make_trainer(directory, scalar_head=case.head, precision=precision, **EVERY_LAYOUT[layout][1])
            results["place"] = (backend.layout.dp_rank, backend.layout.stage, backend.layout.tp_rank)
            results[name, "shards"] = shards_of(backend)
            restarts = Restarts(backend)
            for cut in CUTS:
                restarts.restart()
                results[name, tuple(cut)] = list(steps_of(backend, case, cut))
            backend.close()
        torch.save(results, out_dir / f"{layout}-{precision}-rank{rank}.pt")
