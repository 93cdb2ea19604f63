"""Run a trainer that computes a step's gradient of each objective with a teacher, and records this rank's part."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch
from coati_rl.ops.distilled_loss import DistilledLoss
from consumer.backend import Backend
from consumer.objectives.forward_kl import ForwardKL
from consumer.objectives.objective import Objective
from consumer.objectives.policy_gradient import PolicyGradient
from tests.integration.consumer.conftest import EVERY_LAYOUT
from tests.integration.consumer.gradient_matrix import Run, Trial
from tests.integration.consumer.gradient_process import mini_batches_of, shards_of, share_of
from tests.integration.consumer.samples import samples_near, scale_of, to_mini_batch
from tests.integration.consumer.trainer import make_trainer

_CLIP = PolicyLoss(clip_low=0.2, clip_high=0.28)
OBJECTIVES: dict[str, Objective] = {
    "token": PolicyGradient(loss=_CLIP, teacher_coeff=0.5),
    "token, alone": PolicyGradient(loss=_CLIP, teacher_coeff=0.5, distills_only=True),
    "full": PolicyGradient(loss=DistilledLoss(loss=_CLIP, direction="reverse", kl_coeff=10.0)),
    "forward": ForwardKL(kl_weight=1.0),
    "forward, mixed": ForwardKL(kl_weight=0.75),
}


def aggregation_of(objective: str) -> Any:
    return "token_level" if "forward" in objective else "sample_level"


def take_distillations(
    rank: int, out_dir: Path, model_root: Path, runs: Sequence[tuple[Run, Sequence[Trial]]], teacher: str
) -> None:
    """Write down what this rank holds of the gradients of each trial; `teacher` is a directory beside the models."""
    for run, trials in runs:
        results: dict[Any, Any] = {}
        for model in dict.fromkeys(trial.model for trial in trials):
            backend = make_trainer(
                model_root / model,
                teacher_dir=model_root / teacher,
                precision=run.precision,
                **EVERY_LAYOUT[run.layout][1],
            )
            results["place"] = (backend.layout.dp_rank, backend.layout.stage, backend.layout.tp_rank)
            results[model, "shards"] = shards_of(backend)
            for trial in trials:
                if trial.model == model:
                    results[model, trial.loss, tuple(trial.cut)] = [gradients_of(backend, model_root / model, trial)]
            backend.close()
        torch.save(results, out_dir / f"{run.layout}-{run.precision}-rank{rank}.pt")


def gradients_of(backend: Backend, model_dir: Path, trial: Trial) -> dict[str, Any]:
    """A step's gradients, scaled, and its sums; the weights stay as they are."""
    objective, aggregation = OBJECTIVES[trial.loss], aggregation_of(trial.loss)
    samples, sums = samples_near(model_dir, 0), dict[str, Tensor]()
    scale = scale_of(samples, aggregation)
    mini_batches = mini_batches_of(samples, trial.cut.split, 1)
    for index, part in enumerate(mini_batches):
        case: Any = SimpleNamespace(unit=1, aggregation=aggregation)
        micro_batches, terms = with_teacher(backend, objective, tuple(share_of(part, backend, case, trial.cut)))
        is_last = index == len(mini_batches) - 1
        batch = to_mini_batch(micro_batches, step=0, is_last=is_last)
        sums = merge_sums(merge_sums(sums, terms), backend.forward_backward(batch, objective.losses["policy"]))
    backend.reduce_gradients()
    gradients = {name: gradient * scale for name, gradient in backend.policy.gradients.items()}
    backend.optimizer_step(loss_scale=0.0, learning_rate=0.0)
    return {"gradients": gradients, "sums": backend.reduce_sums(sums), "loss_scale": scale}


def with_teacher(
    backend: Backend, objective: Objective, micro_batches: tuple[MicroBatch, ...]
) -> tuple[tuple[MicroBatch, ...], Mapping[str, Tensor]]:
    """What the objective asks to be scored, and its targets."""
    for name in objective.scores:
        micro_batches = _with(micro_batches, name, backend.score(micro_batches, "teacher"))
    for name in objective.hidden_states:
        micro_batches = _with(micro_batches, name, backend.score(micro_batches, "teacher", "hidden"))
    return objective.targets(micro_batches) if backend.layout.is_last_stage else (micro_batches, {})


def _with(micro_batches: tuple[MicroBatch, ...], name: str, scores: Sequence[Tensor]) -> tuple[MicroBatch, ...]:
    pairs = zip(micro_batches, scores, strict=True) if scores else ()
    return tuple(m.with_arrays(**{name: score.numpy()}) for m, score in pairs) or micro_batches
