"""Manage the data of a run: prompts, leases, slots, finished groups, the trainers' list of work.

Consumes: finished groups from producers, reports from trainers. Waits for: groups (trainers wait), free slots and
current weights (producers wait). Is unblocked by: `put`, reports of syncs, membership changes. Produces: leases, work
items, events for the driver. A plain class; runtime/ makes an actor of it. Every wait has a timeout and a reason.

The lock and all waiting are here; `PromptLeasing` handles the calls of producers, `Scheduler` and `TrainingReports`
those of trainers, under the lock. Batches are packed and files are written without it.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from coati_rl.batching.packed_group import PackedGroup
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.checkpoint.position import Position
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.membership import UNSYNCED
from coati_rl.coordinator.prompt_leasing import PromptLeasing
from coati_rl.coordinator.run_state import RunStart, RunState
from coati_rl.coordinator.run_status import RunStatus, run_status
from coati_rl.coordinator.scheduler import Assembly, Scheduler
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.coordinator.take_over import Decided, LeftState, describe, forget_done, restore_state
from coati_rl.coordinator.training_reports import TrainingReports
from coati_rl.errors import RunError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.reading.prompt_source import PromptSource
from coati_rl.types import RolloutGroup
from coati_rl.work import CommitReport, LeaseReply, ProbeReport, SyncReport, Wait, Work, WorkList

_MAX_UNWRITTEN = 2  # records queued for the disk; with more of them, trainers wait
_MAX_TAKEOVERS = 3  # without an optimizer step in between
_FOR_THE_DISK_S = 20.0  # for which a trainer's report waits; a call to the coordinator may take 30 s


class Coordinator:
    """Answer producers (`ProducerCoordinator`), trainers (`WorkSource`, `StepReports`, `SyncReports`) and the driver.

    All methods may be called from any thread.
    """

    def __init__(
        self,
        settings: CoordinatorSettings,
        source: PromptSource,
        evaluation: EvaluationRounds,
        recorder: RolloutRecorder,
        start: RunStart | None = None,
        ledger: LedgerWriter | None = None,
        left: LeftState | None = None,
    ) -> None:
        """Begin a run, resume it from a checkpoint, or take over from a coordinator that has ended.

        Args:
            settings: sizes, periods and limits.
            source: of training prompts.
            evaluation: evaluation rounds.
            recorder: writer of rollouts.
            start: None: at the beginning, without a probe of weight syncs.
            ledger: writer of decisions and finished groups; None: they are not written.
            left: state of the coordinator that has ended; `start` says no more than the probe then.
        Raises: LedgerError if it cannot go on from there; RunError if this has happened too often.
        """
        start = start or RunStart()
        self._state = RunState(settings, source, evaluation, start, ledger)
        self._state.rollouts_end = recorder.end
        self._changed = self._state.changed
        self._leasing = PromptLeasing(self._state)
        self._reports = TrainingReports(self._state, self._leasing, recorder)
        self._work = WorkList(num_ranks=settings.num_trainers, trainers_per_dp_rank=settings.trainers_per_dp_rank)
        self._decided = Decided()
        self._wait: Wait | None = None  # for the next item, if a trainer has requested it
        self._decider: int | None = None  # the rank that decides the next item; others wait for it, or for its place
        self._decided_item = threading.Condition(self._state.lock)  # notified when it is there
        with self._changed:
            self._scheduler = Scheduler(self._state)
            if left is not None:
                self._take_over(left, source, recorder)
            else:
                position = start.position or Position()
                self._state.ledger.start(
                    position, start.recovered, self._describe, self._changed, has_changed=start.has_changed
                )
        if left is not None:  # it counts, though it may end before it has done anything else
            self._state.ledger.wait_written(self._state.ledger.changed())

    # --- producers -------------------------------------------------------------------------------------------------

    def add_producer(self, producer_id: int, *, version: int = UNSYNCED, is_extra: bool = False) -> None:
        """See `PromptLeasing.add`."""
        with self._change():
            self._leasing.add(producer_id, version, is_extra=is_extra)

    def rejoin(self, producer_id: int, held: Sequence[int]) -> tuple[int, ...]:
        with self._changed:
            return self._leasing.rejoin(producer_id, held)

    def remove_producer(self, producer_id: int, cause: str, *, leaves: bool = False) -> None:
        """Remove a producer; its prompts are issued again. With `leaves` no other one is to replace it."""
        with self._change():
            self._leasing.remove(producer_id, cause, leaves=leaves)

    def lease(self, producer_id: int, *, max_prompts: int, timeout_s: float, is_drained: bool = False) -> LeaseReply:
        """See ProducerCoordinator; waits at most `timeout_s` for the first prompt."""
        with self._changed:
            self._state.lease_waits.wait_for(
                producer_id,
                lambda: self._state.is_finished or not self._leasing.refusal(producer_id, is_drained=is_drained),
                timeout_s,
            )
            return self._leasing.lease(producer_id, max_prompts=max_prompts, is_drained=is_drained)

    def put(self, producer_id: int, groups: Sequence[PackedGroup]) -> int:
        """Receive finished groups. Returns: the number accepted (those under a void lease are not)."""
        with self._state.ledger.room(groups), self._changed:
            return self._leasing.put(producer_id, groups)

    def fail(self, producer_id: int, lease_id: int, cause: str) -> None:
        """Drop a prompt that could not be rolled out: it is recorded and counted, and its slot is freed."""
        with self._changed:
            self._leasing.fail(producer_id, lease_id, cause)

    # --- trainers --------------------------------------------------------------------------------------------------

    def next_work(self, index: int, *, rank: int, timeout_s: float) -> Work | Wait:
        """See WorkSource.

        Raises: RunError when the run cannot continue.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with self._changed:
                found = self._find(index, rank, deadline)
            if not isinstance(found, Assembly):
                return found
            self._assemble(index, found)

    def report_step(self, step: int, metrics: dict[str, Any]) -> None:
        """See StepReports; waits for the disk if more than _MAX_UNWRITTEN steps are not written."""
        with self._change():
            self._reports.step(step, metrics)
        self._state.writer.wait_for_room(max_unfinished=_MAX_UNWRITTEN, timeout_s=_FOR_THE_DISK_S)

    def report_saved(self, step: int, path: str) -> None:
        """See StepReports; a checkpoint is announced after the rollouts that it counts are written."""
        self._state.writer.flush(timeout_s=_FOR_THE_DISK_S)
        with self._change():
            self._reports.saved(step, path)

    def report_probe(self, report: ProbeReport) -> None:
        with self._change():
            self._reports.probe(report)

    def report_sync(self, report: SyncReport) -> None:
        with self._change():
            self._reports.sync(report)

    def report_commit(self, report: CommitReport) -> None:
        with self._change():
            self._reports.commit(report)

    # --- driver ----------------------------------------------------------------------------------------------------

    def events(self, after: int, *, timeout_s: float) -> list[dict[str, Any]]:
        """Return the events from number `after` on, and discard earlier ones; waits at most `timeout_s`."""
        log = self._state.events
        with self._changed:
            log.acknowledge(after)
            self._changed.wait_for(lambda: bool(log.unacknowledged()), timeout_s)
            events = log.unacknowledged()
            number = self._state.ledger.changed() if events else 0
        self._state.ledger.wait_written(number)  # so that their numbers stay, whoever takes over
        return events

    def status(self) -> RunStatus:
        """Return what the run is doing and what it waits for."""
        with self._changed:
            return run_status(self._state, self._leasing, self._wait)

    def stop(self) -> None:
        """Write a checkpoint of the current weights, drop the step in progress, and let the trainers end.

        Batches that were trained have the rest of their updates before.
        """
        with self._change():
            self._state.flow.is_stopped = True
            self._state.progressed()

    def flush(self, *, timeout_s: float) -> None:
        """Wait until rollouts, evaluations and the ledger are written.

        Raises: RunError if they could not be, or not in time.
        """
        self._state.writer.flush(timeout_s=timeout_s)
        self._state.ledger.flush(timeout_s=timeout_s)

    # ---------------------------------------------------------------------------------------------------------------

    def _find(self, index: int, rank: int, deadline: float) -> Work | Wait | Assembly:
        """Return an item, or the assembly that the caller has to make, or at the deadline a Wait; under the lock."""
        try:
            while (work := self._work.ask(index, rank)) is None:
                if problem := self._state.problem:
                    raise RunError(problem)
                if self._decided.assembled is None and self._decider in (None, rank):
                    self._decider = rank
                    decided = self._scheduler.decide(index)
                    if isinstance(decided, Assembly):
                        self._decided.notes[index] = decided.note
                        self._decided.assembled, self._wait = index, None
                        forget_done(self._state, self._work, self._decided)  # without a ledger nobody describes it
                        self._decided.number = self._state.ledger.changed()
                        return decided
                    self._wait = decided
                waits_for = self._changed if self._decider == rank else self._decided_item
                if not waits_for.wait(max(0.0, deadline - time.monotonic())):
                    return self._wait or Wait(reason=f"item {index} is being built")
            return work
        finally:
            if self._decider == rank:
                self._decider = None
                self._decided_item.notify_all()

    def _assemble(self, index: int, assembly: Assembly) -> None:
        """Make an item without the lock, so that producers can deliver meanwhile, and publish it to all ranks."""
        try:
            items = assembly.make()
            self._state.ledger.wait_written(self._decided.number)
        except BaseException as error:
            with self._changed:
                self._decided.assembled = None
                self._decided_item.notify_all()
                self._state.fail(str(error) or type(error).__name__)
            raise
        with self._changed:
            assembly.then()
            self._work.add(index, items)
            self._decided.assembled = None
            self._decided_item.notify_all()
            self._state.progressed()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change the state under the lock; the caller has its answer when the change outlives this process."""
        with self._changed:
            yield
            number = self._state.ledger.changed()
        self._state.ledger.wait_written(number)

    def _describe(self) -> tuple[Any, dict[str, RolloutGroup]]:
        return describe(self._state, self._scheduler, self._work, self._decided)

    def _take_over(self, left: LeftState, source: PromptSource, recorder: RolloutRecorder) -> None:
        """Go on where another coordinator has ended."""
        state = self._state
        self._decided = restore_state(left, state, self._scheduler, self._work, source.find)
        state.num_takeovers += 1
        if state.num_takeovers > _MAX_TAKEOVERS:
            raise RunError(f"the coordinator has ended {state.num_takeovers} times without an optimizer step")
        recorder.cut(state.rollouts_end)
        for _, record in sorted(state.unwritten.items()):
            self._reports.write_step(record)
        state.event("coordinator_replaced", num_leased=state.leases.num_open("train"))
        state.ledger.take_over(self._describe, self._changed)
