"""Execute the work items of a source (train, sync, save, finish) in order on one trainer rank.

Consumes: items of work. Waits for: the next item. Is unblocked by: what the source waits for, such as enough rollouts,
a due sync or the end of the data. Produces: optimizer steps, weights for the producers, checkpoints, metrics.

Every rank executes the same items in the same order; its layout decides what it reports.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coati_rl.batching.packing import build_mini_batch
from coati_rl.checkpoint.directory import ROLLOUTS_FILE
from coati_rl.config.kept_weights import KeptWeights
from coati_rl.errors import RunError
from coati_rl.observability.idle import IdleFraction
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import StepReports, WorkSource
from coati_rl.work import (
    EvaluateWork,
    FinishWork,
    HandOverWork,
    ProbeWork,
    ReferenceWork,
    RepeatWork,
    SaveWork,
    SyncWork,
    TrainWork,
    Wait,
    Work,
)
from consumer.train_step import TrainStep

if TYPE_CHECKING:
    from consumer.backend import Backend

logger = logging.getLogger(__name__)

Publish = Callable[[SyncWork], None]
ScoreProbe = Callable[[ProbeWork], None]
HandOver = Callable[[HandOverWork], None]
OnDataset = Callable[[EvaluateWork | ReferenceWork], None]

POLL_S = 5.0  # time limit of one request to the source, which then answers with the reason for waiting


def _without_producers(work: SyncWork | ProbeWork) -> None:
    """Raise, since a source without producers never orders a weight sync."""
    raise RunError(f"a weight sync to version {work.policy_version} is ordered in a run without producers")


def _without_turns(work: HandOverWork) -> None:
    """Raise, since devices are handed over in runs with --colocate alone."""
    raise RunError(f"the devices are handed over to the {work.to} in a run without turns")


def _without_dataset(work: EvaluateWork | ReferenceWork) -> None:
    """Raise, since a coordinator with producers never orders trainers to score a dataset."""
    raise RunError(f"trainers are given {type(work).__name__} in a run with producers")


class TrainLoop:
    """Run one trainer rank."""

    def __init__(
        self,
        rank: int,
        source: WorkSource,
        reports: StepReports,
        backend: "Backend",
        train_step: Callable[[bool], TrainStep],
        *,
        is_reporter: bool,
        checkpoint_dir: Path,
        publish: Publish = _without_producers,
        score_probe: ScoreProbe = _without_producers,
        hand_over: HandOver = _without_turns,
        on_dataset: OnDataset = _without_dataset,
        on_step: Callable[[], None] = lambda: None,
        kept_weights: KeptWeights | None = None,
        kept_weights_dir: Path = Path(),
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._rank = rank
        self._source = source
        self._reports = reports
        self._backend = backend
        self._train_step = train_step  # True: with a correction for the engine-trainer mismatch
        self._publish, self._score_probe = publish, score_probe
        self._hand_over = hand_over
        self._on_dataset = on_dataset
        self._is_reporter = is_reporter  # True on the one rank that reports optimizer steps
        self._checkpoint_dir = checkpoint_dir
        self._on_step = on_step  # called after every optimizer step (the profiler's clock)
        self._kept_weights, self._kept_weights_dir = kept_weights, kept_weights_dir
        self._is_over = False
        self._reason = ""  # last reported reason for waiting
        self._timeline = timeline
        self._wait_s = 0.0  # time spent waiting for rollouts since the last optimizer step
        self._step_began = time.perf_counter()  # at the last one's end, or the loop's beginning
        self._idle = IdleFraction()  # of this rank; a sync counts as idle time

    def run(self) -> int:
        """Execute items until the source says that the run is over. Returns: optimizer steps taken."""
        fetcher, index = ThreadPoolExecutor(1, thread_name_prefix="next-work"), 0
        self._step_began = time.perf_counter()
        try:
            coming = fetcher.submit(self._next_work, index)
            while not isinstance(work := self._await(coming, index), FinishWork):
                index += 1
                # The next item is prepared and fetched while this one is executed.
                coming = fetcher.submit(self._next_work, index)
                kind = (
                    f"to {work.to}"
                    if isinstance(work, HandOverWork)
                    else type(work).__name__.removesuffix("Work").lower()
                )
                with self._timeline.span(kind, item=index - 1, step=_step_of(work)):
                    if isinstance(work, TrainWork | RepeatWork):
                        self._train(work)
                    elif isinstance(work, SyncWork):
                        self._publish(work)
                    elif isinstance(work, ProbeWork):
                        self._score_probe(work)
                    elif isinstance(work, HandOverWork):
                        self._hand_over(work)
                    elif isinstance(work, EvaluateWork | ReferenceWork):
                        self._on_dataset(work)
                    elif isinstance(work, SaveWork):
                        self._save(work)
            return work.step
        finally:
            self._is_over = True
            fetcher.shutdown(wait=False)

    def _next_work(self, index: int) -> Work | None:
        """Fetch item `index`; None if the loop has ended with an error meanwhile."""
        while not self._is_over:
            work = self._source.next_work(index, rank=self._rank, timeout_s=POLL_S)
            if not isinstance(work, Wait):
                return work
            if work.reason != self._reason:
                self._reason = work.reason
                logger.info("item %d: %s", index, work.reason)
        return None

    def _await(self, coming: "Future[Work | None]", index: int) -> Work | None:
        begin = time.perf_counter()
        self._idle.note(self._rank, is_idle=True)
        with self._timeline.span("wait for work", item=index):
            work = coming.result()
        self._idle.note(self._rank, is_idle=isinstance(work, SyncWork | ProbeWork))
        if isinstance(work, TrainWork | RepeatWork):
            self._wait_s += time.perf_counter() - begin
        return work

    def _train(self, work: TrainWork | RepeatWork) -> None:
        metrics: dict[str, Any] | None
        train_step = self._train_step(work.is_corrected)
        if isinstance(work, RepeatWork):
            step, metrics = work.step, train_step.repeat(work)
        else:
            step, metrics = work.batch.step, train_step.run(build_mini_batch(work.batch))
        if metrics is None:
            return  # the optimizer step continues with the next mini-batch
        began, self._step_began = self._step_began, time.perf_counter()
        if self._is_reporter:
            times = {"step_s": self._step_began - began, "rollout_wait_s": self._wait_s}
            self._reports.report_step(step, {**metrics, **times, "trainer_idle_fraction": self._idle.take()})
        self._wait_s = 0.0
        if self._kept_weights is not None and (step + 1) % self._kept_weights.interval == 0:
            self._keep_weights(step + 1, train_step, last=self._kept_weights.last)
        self._on_step()

    def _keep_weights(self, step: int, train_step: TrainStep, *, last: int) -> None:
        """Write the trained weights for a replay. `step`: optimizer steps taken."""
        with self._timeline.span("keep weights", step=step):
            self._backend.save(
                self._kept_weights_dir / f"step-{step}",
                state={"step": step},
                objective=train_step.objective_state(),
                keep=last,
                has_optimizer=False,
            )

    def _save(self, work: SaveWork) -> None:
        path = self._checkpoint_dir / f"step-{work.step}"
        state = {"step": work.step, "policy_version": work.step, "data": work.data_state}
        self._backend.save(
            path,
            state=state,
            files={ROLLOUTS_FILE: work.rollouts} if work.rollouts else {},
            objective=self._train_step(False).objective_state(),
        )
        if self._rank == 0:
            self._reports.report_saved(work.step, str(path))
            logger.info("step %d: checkpoint %s", work.step, path)


def _step_of(work: Work | None) -> int | None:
    """Return the optimizer step of an item, counted from 1; for a sync or save, the step it comes after."""
    if isinstance(work, TrainWork):
        return work.batch.step + 1
    if isinstance(work, RepeatWork):
        return work.step + 1
    if isinstance(work, EvaluateWork):
        return work.batch.step
    return work.policy_version if isinstance(work, SyncWork | ProbeWork) else getattr(work, "step", None)
