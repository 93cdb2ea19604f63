"""Take in what trainers report: steps, checkpoints, transfers of weights, the producers' commits of them.

In: reports. Out: records for the driver, rollouts for the writer, the weights that each producer holds.
"""

from functools import partial
from typing import Any

import numpy as np

from coati_rl.coordinator.prompt_leasing import PromptLeasing
from coati_rl.coordinator.run_state import RunState
from coati_rl.data.batcher import ClosedStep
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.work import CommitReport, SyncReport


class TrainingReports:
    """Hear the trainers; under the coordinator's lock."""

    def __init__(self, state: RunState, leasing: PromptLeasing, recorder: RolloutRecorder) -> None:
        self._state = state
        self._leasing = leasing
        self._recorder = recorder

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Take the metrics of optimizer step `step` (from 0); with the rollouts' statistics they make one record."""
        state = self._state
        self._judge_gap(state.gate.sampled_problem(step + 1, metrics))
        metrics = {**metrics, "producer_idle_fraction": state.leases.producer_idle.take()}
        for record, closed in state.stats.report(step, metrics):
            state.num_unwritten_steps += 1
            state.writer.submit(partial(self._write_step, record, closed))
        state.progressed()

    def probe(self, policy_version: int, logprobs: np.ndarray) -> None:
        """Take the trainers' log-probabilities of a sync's probe, float32[T - 1]."""
        self._state.gate.expect(policy_version, logprobs)

    def sync(self, report: SyncReport) -> None:
        """Note how the transfer of the SyncWork that was handed out last ended."""
        version = self._state.syncs.transferred(report)
        for producer_id, cause in report.failed.items():
            self._leasing.remove(producer_id, f"weight sync to version {version} failed: {cause}")
        self._state.record_sync()

    def commit(self, report: CommitReport) -> None:
        """Note that a producer serves what it had staged, or is of no further use."""
        self._judge_gap(self._state.syncs.committed(report))
        if report.error is not None:
            self._leasing.remove(report.producer, f"version {report.policy_version}: {report.error}")
        self._state.record_sync()

    def saved(self, step: int, path: str) -> None:
        """Note that a checkpoint is complete."""
        self._state.saves.being_written = None
        self._state.event("checkpoint", step=step, path=path)

    def _write_step(self, record: dict[str, Any], closed: ClosedStep) -> None:
        """Write the rollouts of a step, then tell of it: what metrics.jsonl has is written. In the writer's thread."""
        self._recorder.write(record["step"], closed.groups, advantages=closed.advantages)
        with self._state.changed:
            self._state.num_unwritten_steps -= 1
            self._state.event("step", **record)
            self._state.announce_the_end()

    def _judge_gap(self, problem: str | None) -> None:
        if message := self._state.gate.judge(problem):
            self._state.event("gap", cause=message)
