"""The one owner of data: prompts, leases, slots, finished groups, and the trainers' to-do list.

Consumes: finished groups from producers, reports from trainers. Waits for: groups (trainers wait), free slots and
current weights (producers wait). Is unblocked by: `put`, `report_sync`, membership changes. Produces: leases, work
items, events for the driver. A plain class with one lock; runtime/ makes an actor of it. Every wait has a timeout.

Where each prompt is, and how many may be out, is the business of `PromptFlow`; which groups are trained, that of
`StepCounts`, which keeps the others until the step is complete and recorded with them. A checkpoint carries the
position (`coati_rl.data.position`) from which another coordinator goes on.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

from coati_rl.data.cursor import PromptCursor
from coati_rl.data.evaluation import EvaluationBoard
from coati_rl.data.event_log import EventLog
from coati_rl.data.group_rules import is_in_loss
from coati_rl.data.leases import LeaseBook
from coati_rl.data.membership import Membership
from coati_rl.data.position import Position, data_state
from coati_rl.data.prompt_flow import PromptFlow
from coati_rl.data.rollout_statistics import rollout_statistics
from coati_rl.data.settings import CoordinatorSettings
from coati_rl.data.step_counts import StepCounts
from coati_rl.data.step_records import StepRecords
from coati_rl.data.work import FinishWork, LeaseReply, SaveWork, SyncReport, SyncWork, TodoList, TrainWork, Work
from coati_rl.errors import RunError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.types import Lease, Prompt, RolloutGroup


class Coordinator:
    """See the module's docstring; all methods may be called from any thread."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        cursor: PromptCursor,
        board: EvaluationBoard,
        recorder: RolloutRecorder,
        start: Position | None = None,
    ) -> None:
        """`start`: of the checkpoint that the run is resumed from."""
        if start is None:
            start = Position()
        else:
            cursor.resume(start.num_drawn, start.waiting)
            board.resume(start.step, start.last_evaluated)
        self._settings = settings
        self._cursor = cursor
        self._board = board
        self._recorder = recorder
        self._leases = LeaseBook(settings.sampling_plans, seed=settings.seed)
        self._flow = PromptFlow(settings, cursor, self._leases, start)
        self._members = Membership(start_version=start.step)
        self._changed = threading.Condition()
        self._todo = TodoList(num_ranks=settings.num_trainers, ranks_per_dp_group=settings.ranks_per_dp_group)
        self._sync: SyncWork | None = None  # handed out, not yet reported
        self._last_saved = start.step
        self._sync_s = 0.0
        self._counts = StepCounts(settings, start)
        self._records = StepRecords(first_step=start.step, time_s=start.time_s)
        self._events = EventLog()
        self._is_finished = False
        self._last_progress = time.monotonic()
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
                elif self._counts.add(group):
                    self._flow.add(group)
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
                self._counts.add_failed(lease.group_size, cause)

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
            for record in self._records.report(step, metrics):
                self._event("step", **record)
            self._announce_the_end()

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
            self._events.forget(after)
            self._changed.wait_for(lambda: bool(self._events.kept()), timeout_s)
            return self._events.kept()

    def seconds_since_progress(self) -> float:
        """Time since a group, a step or a sync was last finished."""
        with self._changed:
            return time.monotonic() - self._last_progress

    # --- all below runs under the lock -----------------------------------------------------------------------------

    def _decide(self, index: int) -> list[Work] | None:
        """The next item for every dp rank, or None while it is open."""
        if self._sync is not None or self._is_finished:
            return None
        is_over, dp, step = self._flow.is_over(), self._settings.batch.dp, self._flow.step
        if is_over:
            self._flow.give_up_step()
        at_boundary = self._flow.is_between_steps
        sync_due = at_boundary and self._members.is_sync_due(step, self._settings.sync_period, is_over=is_over)
        if sync_due and self._board.is_running:
            return None  # its answers belong to the weights that serve now
        stale = self._members.stale(step if sync_due else self._members.serving_version)
        if stale:
            self._sync = SyncWork(index=index, policy_version=step, members=stale)
            return [self._sync] * dp
        if sync_due:
            if not self._members.ids:
                return None  # a replacement is on its way
            self._members.complete_sync(step)
            self._flow.free_slots()
            self._changed.notify_all()
        if at_boundary:
            self._evaluate_if_due(is_over=is_over)
            if self._is_save_due(is_over=is_over):
                self._last_saved = step
                return [SaveWork(step=step, data_state=self._data_state())] * dp
        if is_over:
            return None if self._board.is_running else self._finish()
        batches = self._flow.next_mini_batch()
        if batches and batches[0].is_last:
            self._close_step()
        return [TrainWork(batch=batch) for batch in batches] if batches else None

    def _close_step(self) -> None:
        step, groups = self._flow.step, self._flow.close_step()
        counts, dropped = self._counts.take(groups)
        rules = self._settings.batch.rules
        statistics = rollout_statistics(groups, dropped, rules=rules, staleness=self._members.staleness)
        self._records.open(step, {**statistics, **counts, "sync_s": self._sync_s})
        self._recorder.write(step + 1, [*groups, *dropped], is_trained=lambda group: is_in_loss(group, rules))

    def _data_state(self) -> dict[str, Any]:
        position = Position(
            step=self._flow.step,
            num_drawn=self._cursor.num_drawn,
            waiting=tuple(self._flow.waiting()),
            last_evaluated=self._board.last_finished,
            time_s=self._records.time_s,
            **self._counts.dropped(),
        )
        return data_state(position, self._cursor.order)

    def _finish(self) -> list[Work]:
        if self._flow.step == 0:
            raise RunError(self._counts.nothing_trained(self._flow.num_finished))
        self._is_finished = True
        self._announce_the_end()
        return [FinishWork(step=self._flow.step)] * self._settings.batch.dp

    def _announce_the_end(self) -> None:
        """The last event, once: after the last step's record, which may come when the trainers know already."""
        if self._is_finished and self._records.is_complete:
            filtered = self._counts.dropped()["groups_filtered"]  # since the last step, whose record has those before
            numbers = {"groups_dropped": self._flow.num_finished, "groups_filtered": filtered}
            self._event("finished", step=self._flow.step, **numbers)

    def _may_lease(self, producer_id: int) -> bool:
        if self._is_finished or self._sync is not None or not self._members.is_current(producer_id):
            return False
        if self._counts.problem():
            return False  # trainers may be busy for long: what is dropped until they hear of it must not grow
        return self._leases.has_lost or self._board.has_pending or self._flow.may_draw()

    def _draw(self) -> Prompt | None:
        return self._board.draw() or self._flow.draw()

    def _is_save_due(self, *, is_over: bool) -> bool:
        interval = self._settings.save_interval
        due = is_over or (interval is not None and self._flow.step % interval == 0)
        return due and self._flow.step > self._last_saved

    def _evaluate_if_due(self, *, is_over: bool) -> None:
        interval, step = self._settings.eval_interval, self._flow.step
        if interval is None or self._members.serving_version != step:
            return
        if self._board.is_due(step, interval, is_over=is_over):
            self._board.start(step)
            self._changed.notify_all()

    def _finish_evaluation_if_done(self) -> None:
        for summary in self._board.finish_if_done():
            self._event("evaluation", **summary)

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.add(kind, fields)
        self._progressed()

    def _progressed(self) -> None:
        self._last_progress = time.monotonic()
        self._changed.notify_all()
