"""The trainer's loop. Consumes: the to-do list of the coordinator. Waits for: its next item. Is unblocked by: enough
rollouts, a due sync, the end of the data. Produces: optimizer steps, weights for the producers, checkpoints, metrics.

Every rank carries out the same items in the same order; what each reports follows from its place in the layout.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from coati_rl.data.work import FinishWork, SaveWork, SyncReport, SyncWork, TrainWork, Work
from coati_rl.protocols import TrainBackend, TrainerCoordinator
from consumer.train_step import TrainStep
from consumer.weight_publisher import Weights

logger = logging.getLogger(__name__)

Publish = Callable[[SyncWork, Weights], SyncReport | None]  # only the rank that directs a sync has a report

POLL_S = 5.0  # one long poll of the coordinator, which itself watches for stalls


class TrainLoop:
    """One trainer rank."""

    def __init__(
        self,
        rank: int,
        coordinator: TrainerCoordinator,
        backend: TrainBackend,
        train_step: TrainStep,
        publish: Publish,
        *,
        is_reporter: bool,
        checkpoint_dir: Path,
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank = rank
        self._coordinator = coordinator
        self._backend = backend
        self._train_step = train_step
        self._publish = publish
        self._is_reporter = is_reporter  # of optimizer steps: True on one rank
        self._checkpoint_dir = checkpoint_dir
        self._on_step = on_step  # called after every optimizer step (the profiler's clock)
        self._wait_s = 0.0  # for rollouts, since the last optimizer step

    def run(self) -> int:
        """Returns: optimizer steps taken when the run was over."""
        index = 0
        while True:
            begin = time.perf_counter()
            work = self._next_work(index)
            if isinstance(work, TrainWork):
                self._wait_s += time.perf_counter() - begin
                self._train(work)
            elif isinstance(work, SyncWork):
                self._sync(work)
            elif isinstance(work, SaveWork):
                self._save(work)
            elif isinstance(work, FinishWork):
                return work.step
            index += 1

    def _next_work(self, index: int) -> Work:
        while True:
            work = self._coordinator.next_work(index, rank=self._rank, timeout_s=POLL_S)
            if work is not None:
                return work

    def _train(self, work: TrainWork) -> None:
        metrics = self._train_step.run(work.batch)
        if metrics is None:
            return  # the step goes on with the next mini-batch
        if self._is_reporter:
            self._coordinator.report_step(work.batch.step, {**metrics, "rollout_wait_s": self._wait_s})
        self._wait_s = 0.0
        self._on_step()

    def _sync(self, work: SyncWork) -> None:
        # Collective: with sharded weights other ranks take part in the export, one of each stage sends.
        report = self._publish(work, self._backend.export_weights())
        if report is not None:
            self._coordinator.report_sync(report)

    def _save(self, work: SaveWork) -> None:
        path = self._checkpoint_dir / f"step-{work.step}"
        state = {"step": work.step, "policy_version": work.step, "data": work.data_state}
        self._backend.save(path, state=state)
        if self._rank == 0:
            self._coordinator.report_saved(work.step, str(path))
            logger.info("step %d: checkpoint %s", work.step, path)
