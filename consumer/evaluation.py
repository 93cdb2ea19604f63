"""Evaluate a job's objective on held-out samples, without gradient.

Consumes: the parts of evaluation sets. Produces: with the last part of a set, its metrics over all ranks. A set's
metrics are those of a training step with the same samples, such as its loss and perplexity.
"""

import torch
from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.data.packing import build_mini_batch
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import EvaluationReports, TrainBackend
from coati_rl.work import EvaluateWork
from consumer.objectives.objective import Objective
from consumer.train_step import with_targets

_NOT_COMPUTED = ("entropy_sum",)  # scores are log-probabilities alone


class Evaluator:
    """Sum what the loss reports over the parts of an evaluation set."""

    def __init__(
        self,
        backend: TrainBackend,
        objective: Objective,
        reports: EvaluationReports,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._backend = backend
        self._objective = objective
        self._reports = reports
        self._timeline = timeline
        self._begin()

    def _begin(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._denominator = 0.0  # of the loss, over all ranks

    def __call__(self, work: EvaluateWork) -> None:
        """Evaluate one part; collective over the trainers. The reporting rank reports the set after its last part."""
        self._add_sums(work)
        self._denominator += 1 / work.batch.loss_scale if work.batch.loss_scale else 0.0
        if not work.batch.is_last:
            return
        sums, denominator = self._backend.reduce_sums(self._sums), self._denominator
        self._begin()
        if sums and self._backend.layout.is_reporter:
            metrics = self._objective.metrics(
                {name: value for name, value in sums.items() if name not in _NOT_COMPUTED},
                loss_scale=1 / denominator if denominator else 0.0,
            )
            known = {name: value for name, value in metrics.items() if value is not None}
            self._reports.report_evaluation(work.batch.step, work.name, known)

    @torch.no_grad()
    def _add_sums(self, work: EvaluateWork) -> None:
        micro_batches, sums = with_targets(
            self._objective, self._backend, build_mini_batch(work.batch).micro_batches, self._timeline
        )
        self._sums = merge_sums(self._sums, sums)
        scores = self._backend.score(micro_batches)  # none on ranks without the LM head
        for micro_batch, logprobs in zip(micro_batches, scores, strict=False):
            arrays = {name: torch.tensor(a, device=logprobs.device) for name, a in micro_batch.loss_arrays.items()}
            _, sums = self._objective.loss_fn(logprobs, torch.zeros_like(logprobs), arrays)
            self._sums = merge_sums(self._sums, {name: value.detach() for name, value in sums.items()})
