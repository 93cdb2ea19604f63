"""Join the record of each optimizer step from rollout statistics, known at its start, and the trainers' metrics.

Records are returned in the order of steps, whenever and by whichever rank a step is reported: under pipeline
parallelism the last stage reports steps while the first one already requests later work.
"""

import time
from typing import Any, ClassVar


class StepRecords:
    """Keep records until they are complete. Steps count from 0, as in batches; those in records from 1."""

    KEPT: ClassVar = ("_start", "_next_step", "_statistics", "_reported")

    def __init__(self, *, first_step: int, time_s: float) -> None:
        self._start = time.monotonic() - time_s  # of this machine's clock
        self._next_step = first_step
        self._statistics: dict[int, dict[str, Any]] = {}  # of steps without a record yet
        self._reported: dict[int, dict[str, Any]] = {}  # complete ones that wait for an earlier step

    @property
    def time_s(self) -> float:
        """Return the run's wall time, which includes that before the checkpoint of a resumed run."""
        return time.monotonic() - self._start

    @property
    def first_open(self) -> int | None:
        """Return the first step, from 0, that was started and has no record; None if each has one."""
        return min(self._statistics, default=None)

    @property
    def is_complete(self) -> bool:
        """Return True when every started step has its record."""
        return not self._statistics

    def open(self, step: int, statistics: dict[str, Any]) -> None:
        """Start the record of a step that is given to the trainers."""
        self._statistics[step] = statistics

    def is_reported(self, step: int) -> bool:
        """Return True if the metrics of a step, from 0, are there."""
        return step < self._next_step or step in self._reported

    def report(self, step: int, metrics: dict[str, Any]) -> list[dict[str, Any]]:
        """Complete the record of a step. Returns: the records that are due now."""
        self._reported[step] = {"time_s": self.time_s, **metrics}
        records = []
        while self._next_step in self._reported:
            step, self._next_step = self._next_step, self._next_step + 1
            numbers = {"step": step + 1, "policy_version": step + 1}
            records.append({**numbers, **self._statistics.pop(step), **self._reported.pop(step)})
        return records
