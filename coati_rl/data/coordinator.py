"""The one owner of data: prompts, leases, slots, finished groups, and the trainers' to-do list.

Consumes: finished groups from producers, reports from trainers. Waits for: groups (trainers wait), free slots and
current weights (producers wait). Is unblocked by: `put`, reports of syncs, membership changes. Produces: leases, work
items, events for the driver. A plain class with one lock; runtime/ makes an actor of it. Every wait has a timeout.

`PromptFlow` knows where each prompt is and how many may be out, `StepBook` which groups are trained, `WeightSyncs` who
holds which weights, `CheckpointSaves` when a checkpoint is due, and from what in it another coordinator goes on.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from coati_rl.data.evaluation import EvaluationBoard
from coati_rl.data.event_log import EventLog
from coati_rl.data.gap_gate import GapGate
from coati_rl.data.kept_rollouts import KeptRollouts
from coati_rl.data.membership import UNPROVEN, Membership
from coati_rl.data.position import Position
from coati_rl.data.prompt_flow import PromptFlow
from coati_rl.data.prompt_queue import PromptQueue
from coati_rl.data.saves import CheckpointSaves
from coati_rl.data.settings import CoordinatorSettings
from coati_rl.data.step_book import StepBook
from coati_rl.data.timed_leases import TimedLeaseBook
from coati_rl.data.weight_syncs import WeightSyncs
from coati_rl.data.work import CommitReport, FinishWork, LeaseReply, SyncReport, TrainWork, Wait, Work, WorkList
from coati_rl.errors import RunError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.observability.running_clock import RunningClock
from coati_rl.protocols import PromptSource
from coati_rl.types import Lease, Prompt, RolloutGroup


class Coordinator:
    """See the module's docstring; all methods may be called from any thread."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        source: PromptSource,
        board: EvaluationBoard,
        recorder: RolloutRecorder,
        start: Position | None = None,
        kept: KeptRollouts | None = None,
        *,
        probe: Sequence[int] = (),
    ) -> None:
        """Begin a run, or go on.

        Args:
            settings: sizes, periods and limits.
            source: of training prompts.
            board: of evaluations.
            recorder: of rollouts.
            start, kept: of the checkpoint that the run is resumed from.
            probe: token ids whose log-probabilities prove a weight sync; none: syncs are not proved.
        """
        kept, queue = kept or KeptRollouts(), PromptQueue(source)
        if start is not None:
            queue.resume(start.num_drawn, start.waiting)
            board.resume(start.step, start.last_evaluated)
        self._settings, self._dp, start = settings, settings.batch.dp, start or Position()
        self._board = board
        self._leases = TimedLeaseBook(settings.sampling_plans, seed=settings.seed)
        self._flow = PromptFlow(settings, queue, self._leases, start, kept.finished)
        self._members = Membership(start_version=start.step, sync_index_of=kept.sync_index_of)
        self._changed = threading.Condition()
        self._work = WorkList(num_ranks=settings.num_trainers, ranks_per_dp_group=settings.ranks_per_dp_group)
        self._gate = GapGate(settings.gap)
        self._syncs = WeightSyncs(settings, self._members, self._gate, probe=probe)
        self._is_corrected = False  # the present rollout step
        self._book = StepBook(settings, start, recorder, kept)
        self._saves = CheckpointSaves(settings, start, queue, self._flow, self._members, board, self._book)
        self._events = EventLog()
        self._is_finished = False
        self._since_progress = RunningClock()
        with self._changed:
            self._evaluate_if_due(is_over=False)

    # --- producers -------------------------------------------------------------------------------------------------

    def add_producer(self, producer_id: int, *, version: int = UNPROVEN) -> None:
        """A producer joins with these weights; it gets prompts once its weights are current."""
        with self._changed:
            self._members.add(producer_id, version)
            self._leases.producer_idle.join(producer_id)
            self._event("producer_joined", producer=producer_id)

    def remove_producer(self, producer_id: int, cause: str) -> None:
        """A producer is gone: its prompts are issued again."""
        with self._changed:
            if self._members.remove(producer_id):
                lost = self._leases.revoke(producer_id)
                self._event("producer_lost", producer=producer_id, cause=cause, prompts_reissued=lost)
                self._record_sync()

    def lease(self, producer_id: int, *, max_prompts: int, timeout_s: float, is_drained: bool = False) -> LeaseReply:
        """See ProducerCoordinator; waits at most `timeout_s` for the first prompt."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_lease(producer_id, is_drained) or self._is_finished, timeout_s)
            leases: list[Lease] = []
            while len(leases) < max_prompts and self._may_lease(producer_id, is_drained):
                if (lease := self._leases.issue(producer_id, self._draw, sync_index=self._members.sync_index)) is None:
                    break
                leases.append(lease)
                self._changed.notify_all()  # a resumed run trains when its slots are taken
            held = self._members.version(producer_id)
            return LeaseReply(leases=tuple(leases), policy_version=held, is_finished=self._is_finished)

    def put(self, producer_id: int, groups: Sequence[RolloutGroup]) -> int:
        """Hand in finished groups. Returns: how many were accepted (those under a void lease are not)."""
        with self._changed:
            num_accepted = 0
            for group in groups:
                if (settled := self._leases.settle(group.lease_id, producer_id)) is None:
                    continue
                num_accepted += 1
                if group.prompt.purpose == "eval":
                    self._board.add(group)
                elif self._book.counts.add(group):
                    self._flow.add(group, sync_index=settled.sync_index)
            self._finish_evaluation_if_done()
            self._progressed()
            return num_accepted

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        """A prompt that could not be rolled out: recorded, counted, its slot freed."""
        with self._changed:
            if (settled := self._leases.settle(lease_id, producer_id)) is None:
                return
            prompt = settled.lease.prompt
            self._event("rollout_failed", uid=prompt.uid, cause=cause)
            if prompt.purpose == "eval":
                self._board.add_failure(prompt)
                self._finish_evaluation_if_done()
            else:
                self._book.counts.add_failed(settled.lease.group_size, cause)

    # --- trainers --------------------------------------------------------------------------------------------------

    def next_work(self, index: int, *, rank: int, timeout_s: float) -> Work | Wait:
        """See WorkSource.

        Raises: RunError when the run cannot go on.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (work := self._work.ask(index, rank)) is None:
                if problem := self._gate.problem or self._book.counts.problem():
                    raise RunError(problem)
                decided = self._decide(index)
                if decided is not None:
                    self._work.add(index, decided)
                    self._progressed()
                elif not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    return Wait(reason=f"item {index} of the run is not decided")
            return work

    def report_step(self, step: int, metrics: dict[str, Any]) -> None:
        """The trainers took optimizer step `step` (from 0); with the rollouts' statistics it makes one record."""
        with self._changed:
            self._judge_gap(self._gate.sampled_problem(step + 1, metrics))
            metrics = {**metrics, "producer_idle_fraction": self._leases.producer_idle.take()}
            for record in self._book.report(step, metrics):
                self._event("step", **record)
            self._announce_the_end()

    def report_probe(self, policy_version: int, logprobs: np.ndarray) -> None:
        """The trainers' log-probabilities of a sync's probe, float32[T - 1]; before the report of the transfer."""
        with self._changed:
            self._gate.expect(policy_version, logprobs)

    def report_sync(self, report: SyncReport) -> None:
        """The transfer of the SyncWork that was handed out last is over."""
        with self._changed:
            version = self._syncs.transferred(report)
            for producer_id, cause in report.failed.items():
                self.remove_producer(producer_id, f"weight sync to version {version} failed: {cause}")
            self._record_sync()

    def report_commit(self, report: CommitReport) -> None:
        """A producer serves what it had staged, or is of no further use."""
        with self._changed:
            self._judge_gap(self._syncs.committed(report))
            if report.error is not None:
                self.remove_producer(report.producer, f"version {report.policy_version}: {report.error}")
            self._record_sync()

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

    def stop(self) -> None:
        """Write a checkpoint of the weights as they are, drop the step under way, and let the trainers end."""
        with self._changed:
            self._flow.is_stopped = True
            self._progressed()

    def seconds_since_progress(self) -> float:
        """Time since a group, a step or a sync was last finished; while this process was stopped, none passed."""
        with self._changed:
            return self._since_progress.read()

    # --- all below runs under the lock -----------------------------------------------------------------------------

    def _decide(self, index: int) -> list[Work] | None:
        """The next item for every dp rank, or None while it is open."""
        if self._syncs.is_transferring or self._is_finished:
            return None
        if is_over := self._flow.is_over():
            self._flow.give_up_step()
        if self._flow.is_stopped:
            return self._saves.take() if self._saves.has_unsaved_step else self._finish()
        step, at_boundary = self._flow.step, self._flow.is_between_steps
        sync_due = at_boundary and self._members.is_sync_due(step, self._settings.sync_period, is_over=is_over)
        version = step if sync_due else self._members.published_version
        if sync_due and self._board.is_running and self._members.has_current:
            return None  # its answers belong to the weights that serve now, as long as anyone serves them
        stale, is_committing = self._members.stale(version), self._members.is_committing
        if stale and not is_committing:
            return [self._syncs.order(index, step, stale)] * self._dp
        if sync_due and (stale or not self._members.ids):
            return None  # what is staged must not be overwritten; a replacement is on its way
        if sync_due:
            self._members.complete_sync(step)
            self._is_corrected = self._gate.is_corrected  # not in between, where the old policy would be another
            self._flow.free_slots()
            self._changed.notify_all()
        if at_boundary:
            self._evaluate_if_due(is_over=is_over)
            if self._saves.is_due(is_over=is_over):
                return self._saves.take() if self._saves.is_ready else None
        if is_over:
            return None if self._board.is_running or is_committing else self._finish()
        batches = self._flow.next_mini_batch(self._members.sync_index)
        if batches and batches[0].is_last:
            groups = self._flow.close_step()
            self._book.close(step, groups, staleness=self._members.staleness, sync_s=self._syncs.seconds)
        return [TrainWork(batch=batch, is_corrected=self._is_corrected) for batch in batches] if batches else None

    def _finish(self) -> list[Work]:
        if self._flow.step == 0 and not self._flow.is_stopped:
            raise RunError(self._book.counts.nothing_trained(self._flow.num_finished))
        self._is_finished = True
        self._announce_the_end()
        return [FinishWork(step=self._flow.step)] * self._dp

    def _announce_the_end(self) -> None:
        """The last event, once: after the last step's record, which may come when the trainers know already."""
        if self._is_finished and self._book.records.is_complete and not self._flow.is_stopped:
            # Filtered since the last step, whose record has those before.
            filtered = self._book.counts.dropped()["groups_filtered"]
            numbers = {"groups_dropped": self._flow.num_finished, "groups_filtered": filtered}
            self._event("finished", step=self._flow.step, **numbers)

    def _may_lease(self, producer_id: int, is_drained: bool) -> bool:
        if self._is_finished or not self._members.is_current(producer_id, is_drained=is_drained):
            return False
        if self._gate.problem or self._book.counts.problem():
            return False  # trainers may be busy for long: what is dropped until they hear of it must not grow
        return self._leases.has_lost or self._board.has_pending or self._flow.may_draw()

    def _draw(self) -> Prompt | None:
        return self._board.draw() or self._flow.draw()

    def _evaluate_if_due(self, *, is_over: bool) -> None:
        interval, step = self._settings.eval_interval, self._flow.step
        if self._members.published_version == step and self._board.is_due(step, interval, is_over=is_over):
            self._board.start(step)
            self._changed.notify_all()

    def _finish_evaluation_if_done(self) -> None:
        for summary in self._board.finish_if_done():
            self._event("evaluation", **summary)

    def _record_sync(self) -> None:
        if record := self._syncs.take_record():
            self._event("sync", **record)
        self._progressed()

    def _judge_gap(self, problem: str | None) -> None:
        if message := self._gate.judge(problem):
            self._event("gap", cause=message)

    def _event(self, kind: str, **fields: Any) -> None:
        self._events.add(kind, fields)
        self._progressed()

    def _progressed(self) -> None:
        self._since_progress.restart()
        self._changed.notify_all()
