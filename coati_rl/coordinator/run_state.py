"""Hold the coordinator's state, which producers, trainers and the driver use, and its lock.

`PromptFlow` tracks prompts and slots, `StepStats` the groups of steps, `WeightSyncs` the policy version of each
producer, `CheckpointSchedule` when a checkpoint is due and what state of the data it holds.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from coati_rl.checkpoint.ledger_resume import RecoveredRollouts
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.checkpoint.position import Position
from coati_rl.checkpoint.untrained_rollouts import UntrainedRollouts
from coati_rl.coordinator.checkpoint_schedule import CheckpointSchedule
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.event_log import EventLog
from coati_rl.coordinator.lease_waits import LeaseWaits
from coati_rl.coordinator.leases import LeaseTable
from coati_rl.coordinator.ledger import Ledger
from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor
from coati_rl.coordinator.membership import Membership
from coati_rl.coordinator.prompt_flow import PromptFlow
from coati_rl.coordinator.prompt_queue import PromptQueue
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.coordinator.step_stats import StepStats
from coati_rl.coordinator.turns import Turns
from coati_rl.coordinator.weight_syncs import WeightSyncs
from coati_rl.observability.background_writer import BackgroundWriter
from coati_rl.observability.running_clock import RunningClock
from coati_rl.reading.prompt_source import PromptSource


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """Describe where a run begins, or is resumed."""

    position: Position | None = None  # of the checkpoint that it is resumed from
    untrained: UntrainedRollouts | None = None  # of that checkpoint
    recovered: RecoveredRollouts | None = None  # rolled out since, of the ledger
    has_changed: bool = False  # settings or data, since the checkpoint
    probe: Sequence[int] = ()  # token ids whose log-probabilities verify a weight sync; none: syncs are not verified


class RunState:
    """Create the parts; all but the lock and the writer are used under the lock."""

    KEPT: ClassVar = ("is_finished", "_failure", "unwritten", "rollouts_end", "num_takeovers")

    def __init__(
        self,
        settings: CoordinatorSettings,
        source: PromptSource,
        evaluation: EvaluationRounds,
        start: RunStart,
        ledger: LedgerWriter | None = None,
    ) -> None:
        position, untrained, queue = (
            start.position or Position(),
            start.untrained or UntrainedRollouts(),
            PromptQueue(source),
        )
        recovered = start.recovered or RecoveredRollouts(num_drawn=position.num_drawn, waiting=position.waiting)
        if start.position is not None:
            queue.resume(recovered.num_drawn, recovered.waiting)
            evaluation.resume(position.step, position.last_evaluated)
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # notified when the state changes
        self.lease_waits = LeaseWaits(self.lock)
        self.settings = settings
        self.evaluation = evaluation
        self.leases = LeaseTable(settings.sampling_plans, seed=settings.seed, former_ids=recovered.lease_ids)
        self.flow = PromptFlow(settings, queue, self.leases, position, untrained.finished)
        sync_index_of = {**untrained.sync_index_of, **recovered.sync_index_of}
        self.members = Membership(
            start_version=position.step, sync_index_of=sync_index_of, max_staleness=settings.sync.n_behind
        )
        self.turns = Turns(self.members, self.flow, evaluation, are_taken=settings.takes_turns)
        self.mismatch_monitor = LogprobMismatchMonitor(settings.mismatch, settings.sync)
        identities = {**untrained.identities, **recovered.identities}
        self.syncs = WeightSyncs(
            settings, self.members, self.mismatch_monitor, probe=start.probe, identities=identities
        )
        self.stats = StepStats(settings, position, untrained)
        self.checkpoint_schedule = CheckpointSchedule(
            settings, position, queue, self.flow, self.members, evaluation, self.stats, self.syncs.identities
        )
        self.queue = queue
        self.ledger = Ledger(ledger, self.members, self.syncs.identities)
        self._take_up(recovered)
        self.events = EventLog()
        self.writer = BackgroundWriter(self._wake)  # of rollouts and evaluations, without the lock
        self.unwritten: dict[
            int, dict[str, Any]
        ] = {}  # step, from 1 -> its record, which is not yet sent to the driver
        self.rollouts_end = ("", 0)  # file of rollouts, and its size, with the last step that was sent
        self.num_takeovers = 0  # without an optimizer step since
        self.absent: set[int] = set()  # producers that have not said yet what they hold, after a takeover
        self.is_finished = False
        self._failure: str | None = None
        self._since_progress = RunningClock()

    @property
    def problem(self) -> str | None:
        """Return why the run cannot continue; None while it can."""
        return self._failure or self.mismatch_monitor.problem or self.stats.counts.problem() or self._disk_problem

    @property
    def _disk_problem(self) -> str | None:
        return self.writer.problem or self.ledger.problem

    @property
    def idle_s(self) -> float:
        """Return the time since a group, a step or a sync was finished, in which this process was not stopped."""
        return self._since_progress.read()

    def fail(self, problem: str) -> None:
        """Record why the run cannot continue."""
        self._failure = self._failure or problem
        self.notify()

    def notify(self) -> None:
        """Wake all waiting threads."""
        self.changed.notify_all()
        self.lease_waits.notify()

    def progressed(self, *, producers: Iterable[int] | None = None) -> None:
        """Record progress, and wake all waiting threads, but of producers only these; None: all."""
        self._since_progress.restart()
        self.changed.notify_all()
        self.lease_waits.notify(producers)

    def event(self, kind: str, **fields: Any) -> None:
        """Send an event to the driver."""
        self.events.add(kind, fields)
        self.progressed()

    def send_finished_event(self) -> None:
        """Send the event "finished" once, after the last step's record, which may follow the trainers' end."""
        is_complete = self.stats.records.is_complete and not self.unwritten
        if self.is_finished and is_complete and not self.flow.is_stopped:
            # Groups filtered since the last step; its record has those before.
            filtered = self.stats.counts.dropped()["groups_filtered"]
            numbers = {"groups_dropped": self.flow.num_finished, "groups_filtered": filtered}
            self.event("finished", step=self.flow.step, **numbers)

    def record_sync(self, *, producers: Iterable[int] | None = None) -> None:
        """Send the event of a weight sync that all its producers have committed; `producers` as of `progressed`."""
        if record := self.syncs.take_record():
            self.event("sync", **record)
        self.progressed(producers=producers)

    def _take_up(self, recovered: RecoveredRollouts) -> None:
        """Count what the ledger holds as if it came in now."""
        self.stats.counts.expect(len(recovered.finished))
        for each in recovered.finished:
            if self.stats.counts.add(each.group):
                self.flow.recover(each.group, sync_index=each.sync_index)
        for failed in recovered.failed:
            self.stats.counts.add_failed(failed.num_samples, failed.cause)

    def _wake(self) -> None:
        with self.changed:
            self.notify()
