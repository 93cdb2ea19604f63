"""Process the trainers' reports of steps, checkpoints, weight transfers and the producers' commits.

They become records for the driver, rollouts for the writer, and the policy version that each producer holds.
"""

from functools import partial
from typing import Any

from coati_rl.batching.batcher import ClosedStep
from coati_rl.coordinator.prompt_leasing import PromptLeasing
from coati_rl.coordinator.run_state import RunState
from coati_rl.errors import RunError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.work import CommitReport, ProbeReport, SyncReport


class TrainingReports:
    """Process reports; called under the coordinator's lock."""

    def __init__(self, state: RunState, leasing: PromptLeasing, recorder: RolloutRecorder) -> None:
        self._state = state
        self._leasing = leasing
        self._recorder = recorder

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Add the metrics of optimizer step `step` (from 0) to its record."""
        state = self._state
        if state.stats.records.is_reported(step):
            return  # a trainer reports it again that has lost the answer
        state.num_takeovers = 0
        self._handle_mismatch(state.mismatch_monitor.sampled_problem(step + 1, metrics))
        metrics = {**metrics, "producer_idle_fraction": state.leases.producer_idle.take()}
        state.ledger.settled(step)
        for record in state.stats.records.report(step, metrics):
            state.unwritten[record["step"]] = record
            self.write_step(record)
        state.progressed()

    def probe(self, report: ProbeReport) -> None:
        """Store the trainers' log-probabilities of a sync's probe."""
        self._state.mismatch_monitor.expect(report.policy_version, report.logprobs, report.reference)
        if report.producer is not None:
            self._handle_mismatch(self._state.syncs.scored(report.producer))
            self._state.record_sync(producers=())

    def sync(self, report: SyncReport) -> None:
        """Record how the transfer of the last SyncWork ended."""
        if (version := self._state.syncs.transferred(report)) is None:
            return
        for producer_id, cause in report.failed.items():
            self._leasing.remove(producer_id, f"weight sync to version {version} failed: {cause}")
        self._state.record_sync()

    def commit(self, report: CommitReport) -> None:
        """Record that a producer serves its staged weights, or has failed."""
        try:
            self._handle_mismatch(self._state.syncs.committed(report))
        except RunError as error:
            self._state.fail(str(error))
        if report.error is not None:
            self._leasing.remove(report.producer, f"version {report.policy_version}: {report.error}")
        self._state.record_sync(producers=(report.producer,))

    def saved(self, step: int, path: str) -> None:
        """Record that a checkpoint is complete."""
        if self._state.checkpoint_schedule.being_written != step:
            return  # a trainer reports it again that has lost the answer
        self._state.checkpoint_schedule.being_written = None
        self._state.ledger.saved(step)
        self._state.event("checkpoint", step=step, path=path)
        self._state.writer.submit(self._name_best)

    def _name_best(self) -> None:
        """Name the best checkpoint, in the writer's thread: its evaluation may have been complete before it was."""
        if (best := self._state.evaluation.name_best()) is not None:
            with self._state.changed:
                self._state.event("best", **best)

    def write_step(self, record: dict[str, Any]) -> None:
        """Write a step's rollouts and send its event, soon."""
        closed = self._state.stats.closed(record["step"] - 1)
        self._state.writer.submit(partial(self._write_step, record, closed))

    def _write_step(self, record: dict[str, Any], closed: ClosedStep | None) -> None:
        """Write a step's rollouts, then send its event: a step in metrics.jsonl is written. In the writer's thread."""
        if closed is not None:
            identities = self._state.syncs.identities
            self._recorder.write(record["step"], closed.groups, advantages=closed.advantages, identities=identities)
        with self._state.changed:
            self._state.rollouts_end = self._recorder.end
            self._state.stats.written(record["step"] - 1)
            del self._state.unwritten[record["step"]]
            self._state.event("step", **record)
            self._state.send_finished_event()

    def _handle_mismatch(self, problem: str | None) -> None:
        if message := self._state.mismatch_monitor.judge(problem):
            self._state.event("gap", cause=message)
