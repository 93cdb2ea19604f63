"""Decide the work of a job on a dataset, and collect its records: the coordinator of a run without producers.

Consumes: a dataset's steps, reports from trainers. Waits for: the reference's scores, if they are computed first. Is
unblocked by: reports, and `stop`. Produces: items of work, events for the driver, evaluation records. A plain class;
runtime/ makes an actor of it. Each item is decided once, when the first rank asks for it, so that a stop takes effect
at the next one and all ranks do the same.
"""

import json
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.batching.dataset_source import DatasetSource, evaluation_parts
from coati_rl.checkpoint.best import BestCheckpoint
from coati_rl.coordinator.event_log import EventLog
from coati_rl.coordinator.reference_pass import ReferencePass
from coati_rl.coordinator.run_status import RunStatus
from coati_rl.coordinator.step_records import StepRecords
from coati_rl.disk import disk_errors
from coati_rl.observability.running_clock import RunningClock
from coati_rl.samples import RaggedBatch, Sample
from coati_rl.work import EvaluateWork, FinishWork, ReferenceWork, SaveWork, TrainWork, Wait, Work, WorkList

TRAIN = ""  # the name of the source's samples in a reference pass


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetRunSettings:
    """Hold the layout and the intervals of a job on a dataset."""

    job: str  # named in checkpoints, so that no other job resumes from them
    num_trainers: int
    trainers_per_dp_rank: int  # tp * pp * cp
    save_interval: int | None  # optimizer steps; None: only at the end
    eval_interval: int | None  # optimizer steps; None: before the first step and after the last one
    evaluation_dir: Path
    best: BestCheckpoint | None = None  # names the best checkpoint


class DatasetCoordinator:
    """Answer trainers (`WorkSource`, `StepReports`) and the driver; all methods may be called from any thread."""

    def __init__(
        self,
        settings: DatasetRunSettings,
        source: DatasetSource,
        evaluation: Mapping[str, Sequence[Sample]],
        *,
        reference: ReferencePass | None = None,
        last_evaluated: int = -1,
        time_s: float = 0.0,
    ) -> None:
        """Begin a run, or resume it where the source is resumed.

        Args:
            settings: of the run.
            source: of optimizer steps.
            evaluation: the samples of each evaluation set, by name.
            reference: computes the reference's log-probabilities of all sets first; TRAIN is the source's.
            last_evaluated: optimizer steps at the last evaluation before the resume; -1: there was none.
            time_s: wall time of the run before the resume.
        """
        self._settings = settings
        self._source = source
        self._evaluation = evaluation
        self._reference = reference
        self._changed = threading.Condition()
        self._events = EventLog()
        self._records = StepRecords(first_step=source.first_step, time_s=time_s)
        self._work = WorkList(num_ranks=settings.num_trainers, trainers_per_dp_rank=settings.trainers_per_dp_rank)
        self._next = 0  # number of the next item
        self._parts: deque[tuple[str, Sequence[RaggedBatch]]] = deque()  # of the evaluation that is under way
        self._num_parts = 0  # of that evaluation, of all sets
        self._step = self._saved = source.first_step  # optimizer steps that are decided, and in a checkpoint
        self._evaluated = last_evaluated
        self._evaluated_before = last_evaluated  # of the evaluation that is under way
        self._is_stopped = False
        self._doing = "the trainers are starting"
        self._clock = RunningClock()  # in the driver's own process, which may be stopped
        self._changed_at = self._clock.read()

    # --- trainers --------------------------------------------------------------------------------------------------

    def next_work(self, index: int, *, rank: int, timeout_s: float) -> Work | Wait:
        """See WorkSource; only the last scores of the reference are waited for."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (work := self._work.ask(index, rank)) is None:
                decided = self._decide()
                if isinstance(decided, Wait):
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                        return decided
                    continue
                self._work.add(self._next, decided)
                self._next += 1
                self._progressed()
            return work

    def report_step(self, step: int, metrics: dict[str, Any]) -> None:
        with self._changed:
            for record in self._records.report(step, metrics):
                self._event("step", **record)

    def report_reference(self, part: int, logprobs: Sequence[np.ndarray], *, rank: int) -> None:
        """See `consumer.evaluation.DatasetReports`. Raises: RunError if the file cannot be written."""
        with self._changed:
            if self._reference is not None:
                self._reference.add(part, rank // self._settings.trainers_per_dp_rank, logprobs)
            self._progressed()

    def report_saved(self, step: int, path: str) -> None:
        with self._changed:
            self._event("checkpoint", step=step, path=path)
            self._name_best()

    def report_evaluation(self, step: int, name: str, metrics: dict[str, Any]) -> None:
        """See `consumer.evaluation.DatasetReports`; adds a line to <eval dir>/summary.jsonl.

        Raises: RunError if it cannot be written.
        """
        metrics = {key: value if math.isfinite(value) else None for key, value in metrics.items()}  # JSON has no NaN
        with self._changed:
            directory = self._settings.evaluation_dir
            with disk_errors(directory):
                directory.mkdir(parents=True, exist_ok=True)
                with (directory / "summary.jsonl").open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"step": step, "task": name, **metrics}) + "\n")
            self._event("evaluation", step=step, task=name, metrics=metrics)
            self._name_best()

    # --- driver ----------------------------------------------------------------------------------------------------

    def events(self, after: int, *, timeout_s: float) -> list[dict[str, Any]]:
        """Return the events from number `after` on, and discard earlier ones; waits at most `timeout_s`."""
        with self._changed:
            self._events.acknowledge(after)
            self._changed.wait_for(lambda: bool(self._events.unacknowledged()), timeout_s)
            return self._events.unacknowledged()

    def status(self) -> RunStatus:
        """Return what the run is doing."""
        with self._changed:
            return RunStatus(idle_s=self._clock.read() - self._changed_at, text=self._doing)

    def stop(self) -> None:
        """Write a checkpoint after the step in progress, and let the trainers end."""
        with self._changed:
            self._is_stopped = True
            if self._parts:  # the evaluation is not complete: a resumed run has it again
                self._parts.clear()
                self._evaluated = self._evaluated_before

    def flush(self, *, timeout_s: float) -> None:
        """Return at once: everything reported is written."""

    # ---------------------------------------------------------------------------------------------------------------

    def _decide(self) -> Sequence[Work] | Wait:
        """Return the next item, for each dp rank."""
        settings, step = self._settings, self._step
        num_ranks = settings.num_trainers // settings.trainers_per_dp_rank
        if self._reference is not None and not self._is_stopped:
            if not self._reference.is_ordered:
                self._doing = self._reference.progress
                number, batches = self._reference.next_part()
                return [ReferenceWork(part=number, batch=batch) for batch in batches]
            if not self._reference.is_complete:
                return Wait(reason=self._reference.progress)
            self._take_reference(self._reference)
            return [ReferenceWork(part=-1, batch=None)] * num_ranks
        is_over = self._is_stopped or step >= self._source.num_steps
        if not self._is_stopped and not self._parts and self._evaluation_is_due():
            self._evaluated_before, self._evaluated = self._evaluated, step
            self._parts.extend(
                (name, part)
                for name, samples in self._evaluation.items()
                for part in evaluation_parts(samples, self._source.settings)
            )
            self._num_parts = len(self._parts)
        if self._parts:
            name, batches = self._parts.popleft()
            number = self._num_parts - len(self._parts)
            self._doing = f"{name} is being evaluated at step {step}: part {number} of {self._num_parts}"
            return [EvaluateWork(name=name, batch=replace(batch, step=step)) for batch in batches]
        is_multiple = settings.save_interval is not None and step % settings.save_interval == 0
        if step > self._saved and (is_over or is_multiple):
            self._saved = step
            self._doing = f"the checkpoint of step {step} is being written"
            known = {"job": settings.job, "last_evaluated": self._evaluated, "time_s": self._records.time_s}
            return [SaveWork(step=step, data_state={**self._source.data_state(step), **known})] * num_ranks
        if is_over:
            return [FinishWork(step=step)] * num_ranks
        self._step += 1
        self._doing = f"step {self._step} is being trained"
        self._records.open(step, self._source.statistics(step))
        return [TrainWork(batch=batch) for batch in self._source.batches(step)]

    def _take_reference(self, reference: ReferencePass) -> None:
        """Give all samples their scores."""
        self._source.replace_samples(reference.samples(TRAIN))
        self._evaluation = {name: reference.samples(name) for name in self._evaluation}
        self._reference = None

    def _evaluation_is_due(self) -> bool:
        """Return True before the first step, after each interval and at the end, with a step since the last one."""
        step, interval = self._step, self._settings.eval_interval
        if not self._evaluation or step <= self._evaluated:
            return False
        is_first_or_last = self._evaluated < 0 or step >= self._source.num_steps
        return is_first_or_last or (interval is not None and step // interval > self._evaluated // interval)

    def _name_best(self) -> None:
        """Name the best checkpoint: of its evaluation and its files either may be complete first."""
        if self._settings.best is not None and (best := self._settings.best.update()) is not None:
            self._event("best", **best)

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.add(kind, fields)
        self._progressed()

    def _progressed(self) -> None:
        self._changed_at = self._clock.read()
        self._changed.notify_all()
