"""Run scoring, forward and backward of each mini-batch, and the optimizer step after the last one of a step.

Consumes a rank's mini-batches; produces, with the last one, the step's metrics over all ranks. The objective decides
what is scored, what the loss reads and what is reported. Where its targets depend on the whole step, mini-batches are
scored as they arrive and trained after the last one has been scored.
"""

import dataclasses
import time
from typing import Any

from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import TrainBackend
from consumer.logprob_mismatch import MismatchMeter
from consumer.objectives.objective import Objective, Targets
from consumer.optim.learning_rate import LearningRate


class TrainStep:
    """Score mini-batches, accumulate gradients and take optimizer steps."""

    def __init__(
        self,
        backend: TrainBackend,
        objective: Objective,
        timeline: Timeline = NO_TIMELINE,
        *,
        learning_rate: LearningRate,
        mismatch_meter: MismatchMeter | None = None,
    ) -> None:
        """Use a backend that holds the models of the objective's roles.

        Args:
            backend: holds models, gradients and the optimizer.
            objective: defines scores, targets, loss and metrics.
            timeline: records the spans of scoring and training.
            learning_rate: of each optimizer step.
            mismatch_meter: measures tokens that earlier policy versions sampled; None: they are not measured.
        """
        self._backend = backend
        self._objective = objective
        self._timeline = timeline
        self._learning_rate = learning_rate
        self._mismatch_meter = mismatch_meter
        self._old_step: int | None = None  # the step before which the backend copied its old policy
        self._begin()

    def _begin(self) -> None:
        self._waiting: list[MiniBatch] = []  # scored, not yet trained
        self._sums: dict[str, Tensor] = {}
        self._train_s = 0.0

    def run(self, batch: MiniBatch) -> dict[str, Any] | None:
        """Process one mini-batch.

        Returns: the step's metrics by their names in metrics.jsonl, None until the step is complete. Ranks without the
            LM head return only metrics that need no loss.
        """
        begin = time.perf_counter()
        self._keep_old_policy(batch.step)
        if self._mismatch_meter is not None:
            self._add(self._mismatch_meter.measure(batch.micro_batches, step=batch.step))
        micro_batches, sums = with_targets(self._objective, self._backend, batch.micro_batches, self._timeline)
        self._add(sums)
        self._waiting.append(dataclasses.replace(batch, micro_batches=micro_batches))
        if batch.is_last or not self._objective.needs_whole_step:
            for ready in self._take_ready():
                with self._timeline.span("forward_backward"):
                    self._add(self._backend.forward_backward(ready, self._objective.loss_fn))
        self._train_s += time.perf_counter() - begin
        return self._finish(batch) if batch.is_last else None

    def _finish(self, batch: MiniBatch) -> dict[str, Any]:
        begin = time.perf_counter()
        if self._mismatch_meter is not None:
            self._mismatch_meter.end_step(batch.step)
        learning_rate = self._learning_rate.at(batch.learning_rate_progress, step=batch.step)
        with self._timeline.span("optimizer step", step=batch.step + 1):
            norm = self._backend.optimizer_step(loss_scale=batch.loss_scale, learning_rate=learning_rate)
        sums = self._backend.reduce_sums(self._sums)
        metrics = self._objective.metrics(sums, loss_scale=batch.loss_scale) if sums else {}
        seconds = self._train_s + time.perf_counter() - begin
        self._begin()
        return {**metrics, "grad_norm": norm, "learning_rate": learning_rate, "train_s": seconds}

    def _keep_old_policy(self, step: int) -> None:
        """Copy the policy before the first step after a weight sync or a resume: the engines sample with it."""
        period = self._objective.old_policy_period or 1
        if "old" in self._objective.roles and (self._old_step is None or step >= self._old_step + period):
            self._backend.keep_old_policy()
            self._old_step = step - step % period

    def _take_ready(self) -> list[MiniBatch]:
        """Take the waiting mini-batches, with the loss arrays that depend on the whole step."""
        ready, self._waiting = self._waiting, []
        if not self._objective.needs_whole_step:
            return ready
        own = self._objective.step_sums([m for batch in ready for m in batch.micro_batches])
        sums = self._backend.reduce_sums(own)
        if not sums:
            return ready  # no loss is computed here
        return [
            dataclasses.replace(
                batch, micro_batches=tuple(self._objective.with_step_sums(m, sums) for m in batch.micro_batches)
            )
            for batch in ready
        ]

    def _add(self, sums: dict[str, Tensor]) -> None:
        self._sums = merge_sums(self._sums, sums)


def with_targets(
    objective: Objective,
    backend: TrainBackend,
    micro_batches: tuple[MicroBatch, ...],
    timeline: Timeline,
    *,
    needs_hidden: bool = True,
) -> Targets:
    """Add the log-probabilities that the trainer computes, and the targets that depend on them.

    Args:
        objective: names what is computed.
        backend: computes it.
        micro_batches: to be completed.
        timeline: records the spans of scoring.
        needs_hidden: add the hidden states too, which gradients depend on.
    Returns: the micro-batches, and the sums that the targets report; those given on ranks without the LM head.
    """
    has_head, hidden_states = True, objective.hidden_states if needs_hidden else {}
    for name, model in {**objective.scores, **hidden_states}.items():
        compute = backend.score_hidden if name in hidden_states else backend.score
        with timeline.span(f"score {model}"):
            scores = compute(micro_batches, model)
        has_head = len(scores) == len(micro_batches)
        if has_head:
            pairs = zip(micro_batches, scores, strict=True)
            micro_batches = tuple(m.with_arrays(**{name: score.cpu().numpy()}) for m, score in pairs)
    # Without the head no loss is computed here.
    return objective.targets(micro_batches) if has_head else (micro_batches, {})
