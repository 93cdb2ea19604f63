"""Hold the parts of a run that the sides of producers, trainers and the driver share, and the lock that guards them.

`PromptFlow` knows where each prompt is and how many may be out, `StepStats` which groups are trained, `WeightSyncs` who
holds which weights, `CheckpointSaves` when a checkpoint is due, and from what in it another coordinator goes on.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.checkpoint.kept_rollouts import KeptRollouts
from coati_rl.checkpoint.position import Position
from coati_rl.coordinator.checkpoint_schedule import CheckpointSaves
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.event_log import EventLog
from coati_rl.coordinator.logprob_mismatch import LogprobMismatchMonitor
from coati_rl.coordinator.membership import Membership
from coati_rl.coordinator.prompt_flow import PromptFlow
from coati_rl.coordinator.prompt_queue import PromptQueue
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.coordinator.step_stats import StepStats
from coati_rl.coordinator.timed_leases import TimedLeaseTable
from coati_rl.coordinator.weight_syncs import WeightSyncs
from coati_rl.data.prompt_source import PromptSource
from coati_rl.observability.background_writer import BackgroundWriter
from coati_rl.observability.running_clock import RunningClock


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """Say where a run begins, or goes on."""

    position: Position | None = None  # of the checkpoint that it is resumed from
    kept: KeptRollouts | None = None  # of the same
    probe: Sequence[int] = ()  # token ids whose log-probabilities prove a weight sync; none: syncs are not proved


class RunState:
    """Make the parts; all but the lock and the writer are used under the lock."""

    def __init__(
        self, settings: CoordinatorSettings, source: PromptSource, board: EvaluationRounds, start: RunStart
    ) -> None:
        position, kept, queue = start.position or Position(), start.kept or KeptRollouts(), PromptQueue(source)
        if start.position is not None:
            queue.resume(position.num_drawn, position.waiting)
            board.resume(position.step, position.last_evaluated)
        self.changed = threading.Condition()  # the lock, and the news that something happened
        self.settings = settings
        self.board = board
        self.leases = TimedLeaseTable(settings.sampling_plans, seed=settings.seed)
        self.flow = PromptFlow(settings, queue, self.leases, position, kept.finished)
        self.members = Membership(start_version=position.step, sync_index_of=kept.sync_index_of)
        self.gate = LogprobMismatchMonitor(settings.gap)
        self.syncs = WeightSyncs(settings, self.members, self.gate, probe=start.probe)
        self.stats = StepStats(settings, position, kept)
        self.saves = CheckpointSaves(settings, position, queue, self.flow, self.members, board, self.stats)
        self.events = EventLog()
        self.writer = BackgroundWriter(self._wake)  # of rollouts and evaluations, without the lock
        self.num_unwritten_steps = 0  # reported, but not told to the driver
        self.is_finished = False
        self._failure: str | None = None
        self._since_progress = RunningClock()

    @property
    def problem(self) -> str | None:
        """Say why the run cannot go on; None while it can."""
        return self._failure or self.gate.problem or self.stats.counts.problem() or self.writer.problem

    @property
    def idle_s(self) -> float:
        """Return the time since a group, a step or a sync was finished; while this process was stopped, none passed."""
        return self._since_progress.read()

    def fail(self, problem: str) -> None:
        """Note why the run cannot go on."""
        self._failure = self._failure or problem
        self.changed.notify_all()

    def progressed(self) -> None:
        """Note that something was finished, and wake all who wait."""
        self._since_progress.restart()
        self.changed.notify_all()

    def event(self, kind: str, **fields: Any) -> None:
        """Tell the driver of something that happened."""
        self.events.add(kind, fields)
        self.progressed()

    def announce_the_end(self) -> None:
        """Tell it once: after the last step's record, which may come when the trainers know already."""
        is_told = self.stats.records.is_complete and self.num_unwritten_steps == 0
        if self.is_finished and is_told and not self.flow.is_stopped:
            # Filtered since the last step, whose record has those before.
            filtered = self.stats.counts.dropped()["groups_filtered"]
            numbers = {"groups_dropped": self.flow.num_finished, "groups_filtered": filtered}
            self.event("finished", step=self.flow.step, **numbers)

    def record_sync(self) -> None:
        """Tell of a weight sync that all its producers have committed."""
        if record := self.syncs.take_record():
            self.event("sync", **record)
        self.progressed()

    def _wake(self) -> None:
        with self.changed:
            self.changed.notify_all()
