"""Evaluate a job's objective on held-out samples, without gradient.

Consumes: the parts of evaluation sets. Produces: with the last part of a set, its metrics over all ranks. A set's
metrics are those of a training step with the same samples, such as its loss and perplexity; what is estimated over a
step (KTO's divergence) is estimated over each part.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batching.packing import build_mini_batch
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import Role
from coati_rl.samples import RaggedBatch
from coati_rl.work import EvaluateWork
from consumer.objectives.objective import Objective
from consumer.train_step import with_targets

if TYPE_CHECKING:
    from consumer.backend import Backend

_NOT_COMPUTED = ("entropy_sum",)  # scores are log-probabilities alone


class DatasetReports(Protocol):
    """Receive what trainers report of a dataset; see `coati_rl.coordinator.dataset_coordinator.DatasetCoordinator`."""

    def report_reference(self, part: int, logprobs: Sequence[np.ndarray], *, rank: int) -> None:
        """Report the reference's log-probabilities of a part's samples, float32[N] each; by ranks with the LM head."""

    def report_evaluation(self, step: int, name: str, metrics: dict[str, Any]) -> None:
        """Report the metrics of an evaluation set after `step` optimizer steps; called by one rank."""


class Evaluator:
    """Sum what the loss reports over the parts of an evaluation set."""

    def __init__(
        self,
        backend: "Backend",
        objective: Objective,
        reports: DatasetReports,
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
        # What depends on hidden states, as a divergence from a teacher, is not evaluated.
        micro_batches, sums = with_targets(
            self._objective,
            self._backend,
            build_mini_batch(work.batch).micro_batches,
            self._timeline,
            needs_hidden=False,
        )
        self._sums = merge_sums(self._sums, sums)
        if self._objective.needs_whole_step:
            micro_batches = tuple(self._objective.with_whole_step(micro_batches, self._backend.reduce_sums))
        scores = self._backend.score(micro_batches)  # none on ranks without the LM head
        for micro_batch, logprobs in zip(micro_batches, scores, strict=False):
            arrays = {name: torch.tensor(a, device=logprobs.device) for name, a in micro_batch.loss_arrays.items()}
            _, sums = self._objective.losses["policy"](logprobs, torch.zeros_like(logprobs), arrays)
            self._sums = merge_sums(self._sums, {name: value.detach() for name, value in sums.items()})


def score_samples(backend: "Backend", batch: RaggedBatch, role: Role) -> list[np.ndarray] | None:
    """Compute a model's log-probabilities of a rank's samples, float32[N] each in their order; collective.

    Returns: None on ranks without the LM head.
    """
    micro_batches = build_mini_batch(batch).micro_batches
    scores = backend.score(micro_batches, role)
    if len(scores) < len(micro_batches):
        return None
    by_sample: dict[int, np.ndarray] = {}
    for micro_batch, score in zip(micro_batches, scores, strict=True):
        mask, index = micro_batch.loss_arrays["loss_mask"], micro_batch.loss_arrays["sample_index"]
        values = score.float().cpu().numpy()
        by_sample |= {int(number): values[mask & (index == number)] for number in np.unique(index[mask])}
    return [by_sample.get(number, np.empty(0, np.float32)) for number in range(len(batch.samples.lengths))]
