"""Take one mini-batch through the backend, and the optimizer step when it is the last of its step.

Consumes a rank's mini-batches; produces, with the last one, the step's metrics over all ranks. What is scored, what the
loss reads and what is reported is the objective's to say. Where its targets depend on the whole step, the step's
mini-batches are scored as they come and wait for the last one.
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
from consumer.objectives.objective import Objective
from consumer.optim.learning_rate import cosine_learning_rate


class TrainStep:
    """Scores, accumulates, steps."""

    def __init__(
        self,
        backend: TrainBackend,
        objective: Objective,
        timeline: Timeline = NO_TIMELINE,
        *,
        learning_rate: float,
        sampling_gap: MismatchMeter | None = None,
    ) -> None:
        """Take over a backend that holds the models of the objective's roles.

        Args:
            backend: holds models, gradients and the optimizer.
            objective: what is optimised.
            timeline: where scoring and training show.
            learning_rate: at its peak.
            sampling_gap: measures tokens that earlier weights sampled; None: they are not measured.
        """
        self._backend = backend
        self._objective = objective
        self._timeline = timeline
        self._learning_rate = learning_rate
        self._sampling_gap = sampling_gap
        self._old_step: int | None = None  # the step that began with what the backend keeps as old policy
        self._begin()

    def _begin(self) -> None:
        self._waiting: list[MiniBatch] = []  # scored, for the step's last
        self._sums: dict[str, Tensor] = {}
        self._train_s = 0.0

    def run(self, batch: MiniBatch) -> dict[str, Any] | None:
        """Returns: the step's metrics by their names in metrics.jsonl, None until the step is complete.

        On ranks without the LM head there are only those that need no loss.
        """
        begin = time.perf_counter()
        self._keep_old_policy(batch.step)
        if self._sampling_gap is not None:
            self._add(self._sampling_gap.measure(batch.micro_batches, step=batch.step))
        self._waiting.append(dataclasses.replace(batch, micro_batches=self._with_targets(batch.micro_batches)))
        if batch.is_last or not self._objective.needs_whole_step:
            for ready in self._take_ready():
                with self._timeline.span("forward_backward"):
                    self._add(self._backend.forward_backward(ready, self._objective.loss_fn))
        self._train_s += time.perf_counter() - begin
        return self._finish(batch) if batch.is_last else None

    def _finish(self, batch: MiniBatch) -> dict[str, Any]:
        begin = time.perf_counter()
        if self._sampling_gap is not None:
            self._sampling_gap.end_step(batch.step)
        learning_rate = cosine_learning_rate(batch.learning_rate_progress, peak=self._learning_rate)
        with self._timeline.span("optimizer step", step=batch.step + 1):
            norm = self._backend.optimizer_step(loss_scale=batch.loss_scale, learning_rate=learning_rate)
        sums = self._backend.reduce_sums(self._sums)
        metrics = self._objective.metrics(sums, loss_scale=batch.loss_scale) if sums else {}
        seconds = self._train_s + time.perf_counter() - begin
        self._begin()
        return {**metrics, "grad_norm": norm, "learning_rate": learning_rate, "train_s": seconds}

    def _keep_old_policy(self, step: int) -> None:
        """Before the first step after a weight sync, or after a resume: the policy that the engines sample with."""
        period = self._objective.old_policy_period or 1
        if "old" in self._objective.roles and (self._old_step is None or step >= self._old_step + period):
            self._backend.keep_old_policy()
            self._old_step = step - step % period

    def _with_targets(self, micro_batches: tuple[MicroBatch, ...]) -> tuple[MicroBatch, ...]:
        """Add the log-probabilities that only the trainer can give, and what follows from them."""
        has_head = True
        for name, model in self._objective.scores.items():
            with self._timeline.span(f"score {model}"):
                scores = self._backend.score(micro_batches, model)
            has_head = len(scores) == len(micro_batches)
            if has_head:
                pairs = zip(micro_batches, scores, strict=True)
                micro_batches = tuple(m.with_arrays(**{name: score.cpu().numpy()}) for m, score in pairs)
        if not has_head:
            return micro_batches  # no loss is computed here
        micro_batches, sums = self._objective.targets(micro_batches)
        self._add(sums)
        return micro_batches

    def _take_ready(self) -> list[MiniBatch]:
        """The mini-batches that wait, with the arrays that the loss reads."""
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
