"""The one owner of data: prompts, leases, slots, finished groups, and the trainers' to-do list.

Consumes: finished groups from producers, reports from trainers. Waits for: groups (trainers wait), free slots and
current weights (producers wait). Is unblocked by: `put`, `report_sync`, membership changes. Produces: leases, work
items, events for the driver. A plain class with one lock; runtime/ makes an actor of it. Every wait has a timeout.

A slot is taken when a prompt is leased. A trained group's slot is freed when all producers hold the weights of its
rollout step; a failed or undecidable group's at once. Staleness is bounded by the slots alone.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from coati_rl.data.batcher import StepBatcher, rollout_statistics
from coati_rl.data.cursor import PromptCursor
from coati_rl.data.evaluation import EvaluationBoard
from coati_rl.data.leases import LeaseBook
from coati_rl.data.membership import Membership
from coati_rl.data.sample_builder import is_trainable
from coati_rl.data.settings import CoordinatorSettings
from coati_rl.data.step_counts import StepCounts
from coati_rl.data.work import FinishWork, LeaseReply, SaveWork, SyncReport, SyncWork, TodoList, TrainWork, Work
from coati_rl.errors import RunError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.types import Lease, Prompt, RolloutGroup


class Coordinator:
    """See the module's docstring; all methods may be called from any thread."""

    def __init__(
        self, settings: CoordinatorSettings, cursor: PromptCursor, board: EvaluationBoard, recorder: RolloutRecorder
    ) -> None:
        self._settings = settings
        self._cursor = cursor
        self._board = board
        self._recorder = recorder
        self._leases = LeaseBook(settings.sampling_plans, seed=settings.seed)
        self._members = Membership()
        self._changed = threading.Condition()
        self._finished: list[RolloutGroup] = []  # waiting to be trained
        self._num_trained_unsynced = 0  # groups that hold a slot until the next sync
        self._num_settled = 0  # prompts trained, failed or undecidable: the learning rate's clock
        self._step = 0  # optimizer steps handed out
        self._batcher: StepBatcher | None = None
        self._todo = TodoList(num_ranks=settings.num_trainers, ranks_per_dp_group=settings.ranks_per_dp_group)
        self._sync: SyncWork | None = None  # handed out, not yet reported
        self._last_saved = 0
        self._last_evaluated = -1
        self._sync_s = 0.0
        self._counts = StepCounts(max_failed_samples=settings.max_failed_samples)
        self._statistics: dict[int, dict[str, Any]] = {}  # step -> rollout statistics, until the trainers report it
        self._events: list[dict[str, Any]] = []
        self._num_forgotten_events = 0
        self._is_finished = False
        self._start = self._last_progress = time.monotonic()
        with self._changed:
            self._evaluate_if_due(is_over=False)

    # --- producers -------------------------------------------------------------------------------------------------

    def add_producer(self, producer_id: int) -> None:
        """A producer that holds the start weights joins; it gets prompts once its weights are current."""
        with self._changed:
            self._members.add(producer_id)
            self._event("producer_joined", producer=producer_id)

    def remove_producer(self, producer_id: int, cause: str) -> None:
        """A producer is gone: its prompts are issued again."""
        with self._changed:
            if self._members.remove(producer_id):
                lost = self._leases.revoke(producer_id)
                self._event("producer_lost", producer=producer_id, cause=cause, prompts_reissued=lost)

    def lease(self, producer_id: int, *, max_prompts: int, timeout_s: float) -> LeaseReply:
        """Up to `max_prompts` prompts; waits at most `timeout_s` for the first."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_lease(producer_id) or self._is_finished, timeout_s)
            leases: list[Lease] = []
            while len(leases) < max_prompts and self._may_lease(producer_id):
                lease = self._leases.issue(producer_id, self._draw)
                if lease is None:
                    break
                leases.append(lease)
            return LeaseReply(leases=tuple(leases), is_finished=self._is_finished)

    def put(self, producer_id: int, groups: Sequence[RolloutGroup]) -> int:
        """Hand in finished groups. Returns: how many were accepted (those under a void lease are not)."""
        with self._changed:
            accepted = [group for group in groups if self._leases.settle(group.lease_id, producer_id)]
            for group in accepted:
                if group.prompt.purpose == "eval":
                    self._board.add(group)
                else:
                    self._add_group(group)
            self._finish_evaluation_if_done()
            self._progressed()
            return len(accepted)

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        """A prompt that could not be rolled out: recorded, counted, its slot freed."""
        with self._changed:
            lease = self._leases.settle(lease_id, producer_id)
            if lease is None:
                return
            self._event("rollout_failed", uid=lease.prompt.uid, cause=cause)
            if lease.prompt.purpose == "eval":
                self._board.add_failure(lease.prompt)
                self._finish_evaluation_if_done()
            else:
                self._drop_group(num_failed=lease.group_size)

    # --- trainers --------------------------------------------------------------------------------------------------

    def next_work(self, index: int, *, rank: int, timeout_s: float) -> Work | None:
        """Item `index` of the to-do list for a trainer rank; None if it is not decided within `timeout_s`.

        Raises: RunError when the run cannot go on.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (work := self._todo.ask(index, rank)) is None:
                if problem := self._counts.problem():
                    raise RunError(problem)
                decided = self._decide(index)
                if decided is not None:
                    self._todo.add(index, decided)
                    self._progressed()
                elif not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return None
            return work

    def report_step(self, step: int, metrics: dict[str, Any]) -> None:
        """The trainers took optimizer step `step` (from 0); with the rollouts' statistics it makes one record."""
        with self._changed:
            record = {"step": step + 1, "policy_version": step + 1, "time_s": time.monotonic() - self._start}
            self._event("step", **record, **self._statistics.pop(step), **metrics)

    def report_sync(self, report: SyncReport) -> None:
        """The end of the SyncWork that was handed out last."""
        with self._changed:
            if self._sync is None or report.index != self._sync.index:
                raise RunError(f"report of sync {report.index}, but {self._sync} is under way")
            version, self._sync, self._sync_s = self._sync.policy_version, None, report.seconds
            self._members.committed(report.committed, version)
            for producer_id, cause in report.failed.items():
                self.remove_producer(producer_id, f"weight sync to version {version} failed: {cause}")
            details = {"producers": list(report.committed), "seconds": report.seconds, "digest": report.digest}
            self._event("sync", policy_version=version, **details)

    def report_saved(self, step: int, path: str) -> None:
        """A checkpoint is complete."""
        with self._changed:
            self._event("checkpoint", step=step, path=path)

    # --- driver ----------------------------------------------------------------------------------------------------

    def events(self, after: int, *, timeout_s: float) -> list[dict[str, Any]]:
        """Events from number `after` on, and forget those before; waits at most `timeout_s` for the first."""
        with self._changed:
            del self._events[: after - self._num_forgotten_events]
            self._num_forgotten_events = after
            self._changed.wait_for(lambda: bool(self._events), timeout_s)
            return list(self._events)

    def seconds_since_progress(self) -> float:
        """Time since a group, a step or a sync was last finished."""
        with self._changed:
            return time.monotonic() - self._last_progress

    # --- all below runs under the lock -----------------------------------------------------------------------------

    def _decide(self, index: int) -> list[Work] | None:
        """The next item for every dp rank, or None while it is open."""
        if self._sync is not None or self._is_finished:
            return None
        is_over = self._is_over()
        if is_over and self._batcher is not None:  # a step that will never be full is not taken
            self._finished.extend(self._batcher.groups)
            self._batcher = None
        at_boundary, dp = self._batcher is None, self._settings.batch.dp
        sync_due = at_boundary and self._members.is_sync_due(self._step, self._settings.sync_period, is_over=is_over)
        if sync_due and self._board.is_running:
            return None  # its answers belong to the weights that serve now
        stale = self._members.stale(self._step if sync_due else self._members.serving_version)
        if stale:
            self._sync = SyncWork(index=index, policy_version=self._step, members=stale)
            return [self._sync] * dp
        if sync_due:
            if not self._members.ids:
                return None  # a replacement is on its way
            self._members.complete_sync(self._step)
            self._num_trained_unsynced = 0
            self._changed.notify_all()
        if at_boundary:
            self._evaluate_if_due(is_over=is_over)
            if self._is_save_due(is_over=is_over):
                self._last_saved = self._step
                return [SaveWork(step=self._step)] * dp
        if is_over:
            return None if self._board.is_running else self._finish()
        return self._next_mini_batch()

    def _next_mini_batch(self) -> list[Work] | None:
        size = self._settings.batch.prompts_per_mini_batch
        if len(self._finished) < size:
            return None
        if self._batcher is None:
            progress = min(1.0, self._num_settled / self._settings.num_prompts_due(self._cursor.num_due))
            self._batcher = StepBatcher(self._settings.batch, step=self._step, learning_rate_progress=progress)
        # Oldest weights first: that is what keeps staleness below its bound.
        self._finished.sort(key=lambda group: (group.oldest_version, group.lease_id))
        batches = self._batcher.add(self._finished[:size])
        del self._finished[:size]
        self._num_trained_unsynced += size
        self._num_settled += size
        if batches[0].is_last:
            self._close_step(self._batcher.groups)
        return [TrainWork(batch=batch) for batch in batches]

    def _close_step(self, groups: Sequence[RolloutGroup]) -> None:
        statistics = rollout_statistics(groups, self._members.staleness)
        self._statistics[self._step] = {**statistics, **self._counts.take(), "sync_s": self._sync_s}
        self._recorder.write(self._step + 1, groups)
        self._batcher = None
        self._step += 1

    def _finish(self) -> list[Work]:
        self._is_finished = True
        self._event("finished", step=self._step, groups_dropped=len(self._finished))
        return [FinishWork(step=self._step)] * self._settings.batch.dp

    def _add_group(self, group: RolloutGroup) -> None:
        num_failed = int((~is_trainable(group)).sum())
        if num_failed == len(group.scores):
            self._drop_group(num_failed=num_failed)
        else:
            self._finished.append(group)
            self._counts.add_group(num_failed=num_failed, is_filtered=False)

    def _drop_group(self, *, num_failed: int) -> None:
        self._num_settled += 1
        self._counts.add_group(num_failed=num_failed, is_filtered=True)
        self._progressed()

    def _may_lease(self, producer_id: int) -> bool:
        if self._is_finished or self._sync is not None or not self._members.is_current(producer_id):
            return False
        return self._leases.has_lost or self._board.has_pending or self._may_draw()

    def _may_draw(self) -> bool:
        """True if a new training prompt has a slot and will be needed."""
        ahead = self._leases.num_open("train") + len(self._finished)
        if ahead + self._num_trained_unsynced >= self._settings.num_slots or not self._cursor.has_more:
            return False
        if self._settings.max_steps is None:
            return True
        in_step = self._batcher.num_prompts if self._batcher else 0
        return (self._settings.max_steps - self._step) * self._settings.batch.prompts_per_step > ahead + in_step

    def _draw(self) -> Prompt | None:
        return self._board.draw() or (self._cursor.draw() if self._may_draw() else None)

    def _is_over(self) -> bool:
        """True when no further optimizer step can be filled."""
        if self._settings.max_steps is not None and self._step >= self._settings.max_steps:
            return True
        if self._cursor.has_more or self._leases.num_open("train"):
            return False
        in_step = self._batcher.num_prompts if self._batcher else 0
        return len(self._finished) + in_step < self._settings.batch.prompts_per_step

    def _is_save_due(self, *, is_over: bool) -> bool:
        interval = self._settings.save_interval
        due = is_over or (interval is not None and self._step % interval == 0)
        return due and self._step > self._last_saved

    def _evaluate_if_due(self, *, is_over: bool) -> None:
        interval, step = self._settings.eval_interval, self._step
        if interval is None or self._board.is_running or step <= self._last_evaluated:
            return
        if self._members.serving_version == step and (is_over or step // interval > self._last_evaluated // interval):
            self._last_evaluated = step
            self._board.start(step)
            self._changed.notify_all()

    def _finish_evaluation_if_done(self) -> None:
        for summary in self._board.finish_if_done():
            self._event("evaluation", **summary)

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.append({"event": kind, **fields})
        self._progressed()

    def _progressed(self) -> None:
        self._last_progress = time.monotonic()
        self._changed.notify_all()
