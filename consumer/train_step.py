"""Run scoring, forward and backward of each mini-batch, and the optimizer step after the last one of a step.

Consumes a rank's mini-batches; produces, with the last one, the step's metrics over all ranks. The objective decides
what is scored, what the loss reads and what is reported. Where its targets depend on the whole step, mini-batches are
scored as they arrive and trained after the last one has been scored. Where a batch has several updates, the scores and
targets of the first one serve all of them.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from coati_rl.algorithms.sums import merge_sums
from coati_rl.batch import MicroBatch, MiniBatch
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import Role
from coati_rl.work import RepeatWork
from consumer.gradient_record import GradientRecorder
from consumer.logprob_mismatch import MismatchMeter
from consumer.objectives.objective import Objective, Targets
from consumer.optim.learning_rate import LearningRate

if TYPE_CHECKING:
    from consumer.backend import Backend
    from consumer.models.policy_model import Output

MicroBatches = tuple[MicroBatch, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptStep:
    """Hold the mini-batches of a step for later updates."""

    batches: Sequence[MiniBatch]  # with scores and targets, without hidden states, which would take too much memory
    sums: dict[str, Tensor]  # that the targets report


class TrainStep:
    """Score mini-batches, accumulate gradients and take optimizer steps."""

    def __init__(
        self,
        backend: "Backend",
        objective: Objective,
        timeline: Timeline = NO_TIMELINE,
        *,
        learning_rate: LearningRate,
        mismatch_meter: MismatchMeter | None = None,
        recorder: GradientRecorder | None = None,
    ) -> None:
        """Use a backend that holds the models of the objective's roles.

        Args:
            backend: holds models, gradients and the optimizer.
            objective: defines scores, targets, loss and metrics.
            timeline: records the spans of scoring and training.
            learning_rate: of each optimizer step.
            mismatch_meter: measures tokens that earlier policy versions sampled; None: they are not measured.
            recorder: writes the gradient of each step, for a replay; None: it is not written.
        """
        self._backend = backend
        self._objective = objective
        self._timeline = timeline
        self._learning_rate = learning_rate
        self._mismatch_meter = mismatch_meter
        self._recorder = recorder
        self._observed: dict[str, Any] = {} if recorder is None else {"observe": recorder.observe}
        self._old_step: int | None = None  # the step before which the backend copied its old policy
        self._kept: dict[int, KeptStep] = {}  # steps whose batch has updates to come
        steps_of_roles = (objective.num_steps(role) for role in objective.losses)
        self._keeps_batches = max(objective.updates_per_batch, *steps_of_roles) > 1
        self._begin()

    def _begin(self) -> None:
        self._waiting: list[MiniBatch] = []  # scored, not yet trained
        self._trained: list[MiniBatch] = []  # only if they are to be kept
        self._sums: dict[str, Tensor] = {}
        self._target_sums: dict[str, Tensor] = {}
        self._train_s = 0.0

    def run(self, batch: MiniBatch) -> dict[str, Any] | None:
        """Process one mini-batch of a run.

        Returns: the step's metrics by their names in metrics.jsonl, None until the step is complete. Ranks without the
            LM head return only metrics that need no loss.
        """
        self._keep_old_policy(batch.step)
        self.accumulate(batch)
        if not batch.is_last:
            return None
        self._train_waiting()
        if self._objective.updates_per_batch > 1:
            self._kept[batch.step] = KeptStep(batches=self._trained, sums=self._target_sums)
        return self._finish(batch)

    def accumulate(self, batch: MiniBatch) -> dict[str, Tensor]:
        """Score one mini-batch, and add its gradient to the step's as soon as its targets are known.

        Returns: the sums that the loss has reported, of this rank; none where the targets depend on the whole step.
        """
        begin = time.perf_counter()
        if self._mismatch_meter is not None:
            self._add(self._mismatch_meter.measure(batch.micro_batches, step=batch.step))
        micro_batches, of_targets = with_targets(self._objective, self._backend, batch.micro_batches, self._timeline)
        self._add(of_targets)
        self._target_sums = merge_sums(self._target_sums, of_targets)
        self._waiting.append(dataclasses.replace(batch, micro_batches=micro_batches))
        self._train_s += time.perf_counter() - begin
        return {} if self._objective.needs_whole_step else merge_sums(of_targets, self._train_waiting())

    def repeat(self, work: RepeatWork) -> dict[str, Any]:
        """Take another optimizer step on the batch of an earlier one. Returns: its metrics, as `run` does."""
        begin = time.perf_counter()
        if self._waiting or self._trained:  # of a step that will not be completed, as the run ends
            self.drop()
        kept = self._kept.pop(work.first_step) if work.is_last else self._kept[work.first_step]
        self._add(kept.sums)
        for batch in kept.batches:
            micro_batches, _ = _scored(
                batch.micro_batches, self._objective.hidden_states, self._backend, self._timeline, output="hidden"
            )
            self._forward_backward(dataclasses.replace(batch, step=work.step, micro_batches=micro_batches))
        last = dataclasses.replace(kept.batches[-1], step=work.step, learning_rate_progress=work.learning_rate_progress)
        self._train_s += time.perf_counter() - begin
        self._trained = [*kept.batches]
        return self._finish(last)

    def drop(self) -> None:
        """Begin the step anew, without what has been accumulated; not collective."""
        for role in self._objective.losses:
            self._backend.models[role].forget_gradients()
        self._begin()

    def objective_state(self) -> dict[str, Any]:
        """Return what the objective has adapted to the run, for a checkpoint."""
        return self._objective.state()

    def _train_waiting(self) -> dict[str, Tensor]:
        """Train the mini-batches that have been scored. Returns: the sums that the loss has reported."""
        begin, sums = time.perf_counter(), dict[str, Tensor]()
        for ready in self._take_ready():
            sums = merge_sums(sums, self._forward_backward(ready))
            if self._keeps_batches:
                self._keep(ready)
        self._train_s += time.perf_counter() - begin
        return sums

    def _forward_backward(self, batch: MiniBatch) -> dict[str, Tensor]:
        sums = dict[str, Tensor]()
        for role, loss in self._objective.losses.items():
            with self._timeline.span("forward_backward"):
                sums = merge_sums(sums, self._backend.forward_backward(batch, loss, role))
        self._add(sums)
        return sums

    def _keep(self, batch: MiniBatch) -> None:
        hidden = self._objective.hidden_states
        kept = [
            m.replace_arrays({name: array for name, array in m.loss_arrays.items() if name not in hidden})
            for m in batch.micro_batches
        ]
        self._trained.append(dataclasses.replace(batch, micro_batches=tuple(kept)))

    def _finish(self, batch: MiniBatch) -> dict[str, Any]:
        learning_rate = self._learning_rate.at(batch.learning_rate_progress, step=batch.step)
        return self.finish(step=batch.step, loss_scale=batch.loss_scale, learning_rate=learning_rate)

    def finish(self, *, step: int, loss_scale: float, learning_rate: float, **options: Any) -> dict[str, Any]:
        """Take the optimizer step on what has been accumulated.

        Args:
            step: number of optimizer steps before this one.
            loss_scale: factor from the summed loss to its mean.
            learning_rate: of this step.
            options: others of the backend's `optimizer_step`.
        Returns: the step's metrics, as `run` does.
        """
        self._train_waiting()
        begin = time.perf_counter()
        if self._mismatch_meter is not None:
            self._mismatch_meter.end_step(step)
        with self._timeline.span("optimizer step", step=step + 1):
            norms = {}
            for role, loss in self._objective.losses.items():
                rate = self._objective.rate_of(role, step)
                for number in range(self._objective.num_steps(role)):
                    for trained in self._trained if number else ():
                        self._backend.forward_backward(dataclasses.replace(trained, step=step), loss, role)
                    norms[role] = self._backend.optimizer_step(
                        loss_scale=loss_scale if rate else 0.0,
                        learning_rate=rate * learning_rate,
                        role=role,
                        **(self._observed if not number else {}),
                        **options,
                    )
        if self._recorder is not None:
            self._recorder.write(step + 1)
        sums = self._backend.reduce_sums(self._sums)
        metrics = self._objective.metrics(sums, loss_scale=loss_scale) if sums else {}
        if sums:
            self._objective.end_step(sums)
        if mix := self._objective.reference_mix(step):
            self._backend.move_reference(mix)
        seconds = self._train_s + time.perf_counter() - begin
        self._begin()
        others: dict[str, float | None] = {
            f"{role}_grad_norm": norm for role, norm in norms.items() if role != "policy"
        }
        others |= self._backend.router_metrics()
        own = {"grad_norm": norms["policy"], **others, "learning_rate": learning_rate, "train_s": seconds}
        return {**metrics, **own}

    def _keep_old_policy(self, step: int) -> None:
        """Copy the policy before the first step after a weight sync or a resume: the engines sample with it."""
        period = self._objective.old_policy_period or 1
        if "old" in self._objective.roles and (self._old_step is None or step >= self._old_step + period):
            self._backend.keep_old_policy()
            self._old_step = step - step % period

    def _take_ready(self) -> list[MiniBatch]:
        """Take the waiting mini-batches, with the loss arrays that depend on the whole step."""
        ready, self._waiting = self._waiting, []
        if not self._objective.needs_whole_step or not ready:
            return ready
        of_step = [micro_batch for batch in ready for micro_batch in batch.micro_batches]
        done = iter(self._objective.with_whole_step(of_step, self._backend.reduce_sums))
        return [
            dataclasses.replace(batch, micro_batches=tuple(islice(done, len(batch.micro_batches)))) for batch in ready
        ]

    def _add(self, sums: dict[str, Tensor]) -> None:
        self._sums = merge_sums(self._sums, sums)


def with_targets(
    objective: Objective,
    backend: "Backend",
    micro_batches: MicroBatches,
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
    micro_batches, has_head = _scored(micro_batches, objective.scores, backend, timeline)
    if objective.entropies:
        micro_batches, has_head = _scored(micro_batches, objective.entropies, backend, timeline, output="entropy")
    if needs_hidden and objective.hidden_states:
        micro_batches, has_head = _scored(micro_batches, objective.hidden_states, backend, timeline, output="hidden")
    # Without the head no loss is computed here.
    return objective.targets(micro_batches) if has_head else (micro_batches, {})


def _scored(
    micro_batches: MicroBatches,
    models: Mapping[str, Role],
    backend: "Backend",
    timeline: Timeline,
    *,
    output: "Output" = "scores",
) -> tuple[MicroBatches, bool]:
    """Add the scores of each model, by the name of the loss array; False on ranks without the LM head."""
    has_head = True
    for name, model in models.items():
        with timeline.span(f"score {model}"):
            scores = backend.score(micro_batches, model, output)
        has_head = len(scores) == len(micro_batches)
        if has_head:
            pairs = zip(micro_batches, scores, strict=True)
            micro_batches = tuple(m.with_arrays(**{name: score.cpu().numpy()}) for m, score in pairs)
    return micro_batches, has_head
