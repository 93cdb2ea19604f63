"""The trainer's loop. Consumes: the to-do list of the coordinator. Waits for: its next item. Is unblocked by: enough
rollouts, a due sync, the end of the data. Produces: optimizer steps, weights for the producers, checkpoints, metrics.

Every rank carries out the same items in the same order; what each reports follows from its place in the layout.
"""

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from coati_rl.data.checkpoint_dir import ROLLOUTS_FILE
from coati_rl.data.packing import build_mini_batch
from coati_rl.data.work import FinishWork, SaveWork, SyncWork, TrainWork, Work
from coati_rl.observability.idle import IdleShare
from coati_rl.observability.timeline import NO_TIMELINE, Timeline
from coati_rl.protocols import TrainBackend, TrainerCoordinator
from consumer.train_step import TrainStep

logger = logging.getLogger(__name__)

Publish = Callable[[SyncWork], None]

POLL_S = 5.0  # one long poll of the coordinator, which itself watches for stalls


class TrainLoop:
    """One trainer rank."""

    def __init__(
        self,
        rank: int,
        coordinator: TrainerCoordinator,
        backend: TrainBackend,
        train_step: Callable[[bool], TrainStep],
        publish: Publish,
        *,
        is_reporter: bool,
        checkpoint_dir: Path,
        on_step: Callable[[], None] = lambda: None,
        timeline: Timeline = NO_TIMELINE,
    ) -> None:
        self._rank = rank
        self._coordinator = coordinator
        self._backend = backend
        self._train_step = train_step  # with a correction for the engine-trainer gap, or without
        self._publish = publish
        self._is_reporter = is_reporter  # of optimizer steps: True on one rank
        self._checkpoint_dir = checkpoint_dir
        self._on_step = on_step  # called after every optimizer step (the profiler's clock)
        self._is_over = False
        self._timeline = timeline
        self._wait_s = 0.0  # for rollouts, since the last optimizer step
        self._idle = IdleShare()  # of this rank; a sync is idle time, too

    def run(self) -> int:
        """Returns: optimizer steps taken when the run was over."""
        fetcher, index = ThreadPoolExecutor(1, thread_name_prefix="next-work"), 0
        try:
            coming = fetcher.submit(self._next_work, index)
            while not isinstance(work := self._await(coming, index), FinishWork):
                index += 1
                # The next item is put together, and comes here, while this one is carried out.
                coming = fetcher.submit(self._next_work, index)
                kind = type(work).__name__.removesuffix("Work").lower()
                with self._timeline.span(kind, item=index - 1, step=_step_of(work)):
                    if isinstance(work, TrainWork):
                        self._train(work)
                    elif isinstance(work, SyncWork):
                        self._publish(work)
                    elif isinstance(work, SaveWork):
                        self._save(work)
            return work.step
        finally:
            self._is_over = True
            fetcher.shutdown(wait=False)

    def _next_work(self, index: int) -> Work | None:
        """Item `index`; None if the loop has ended meanwhile, with an error."""
        work: Work | None = None
        while work is None and not self._is_over:
            work = self._coordinator.next_work(index, rank=self._rank, timeout_s=POLL_S)
        return work

    def _await(self, coming: "Future[Work | None]", index: int) -> Work | None:
        begin = time.perf_counter()
        self._idle.note(self._rank, is_idle=True)
        with self._timeline.span("wait for work", item=index):
            work = coming.result()
        self._idle.note(self._rank, is_idle=isinstance(work, SyncWork))
        if isinstance(work, TrainWork):
            self._wait_s += time.perf_counter() - begin
        return work

    def _train(self, work: TrainWork) -> None:
        metrics = self._train_step(work.is_corrected).run(build_mini_batch(work.batch))
        if metrics is None:
            return  # the step goes on with the next mini-batch
        if self._is_reporter:
            waits = {"rollout_wait_s": self._wait_s, "trainer_idle_fraction": self._idle.take()}
            self._coordinator.report_step(work.batch.step, {**metrics, **waits})
        self._wait_s = 0.0
        self._on_step()

    def _save(self, work: SaveWork) -> None:
        path = self._checkpoint_dir / f"step-{work.step}"
        state = {"step": work.step, "policy_version": work.step, "data": work.data_state}
        self._backend.save(path, state=state, files={ROLLOUTS_FILE: work.rollouts} if work.rollouts else {})
        if self._rank == 0:
            self._coordinator.report_saved(work.step, str(path))
            logger.info("step %d: checkpoint %s", work.step, path)


def _step_of(work: Work | None) -> int | None:
    """The optimizer step, counted from 1, that an item belongs to: that after which weights are sent or saved."""
    if isinstance(work, TrainWork):
        return work.batch.step + 1
    return work.policy_version if isinstance(work, SyncWork) else getattr(work, "step", None)
