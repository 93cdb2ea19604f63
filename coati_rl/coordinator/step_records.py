"""Join the record of each optimizer step: rollout statistics, known when it is handed out, and the trainers' metrics.

Records come out in the order of steps, however late and by whichever rank a step is reported: under pipeline
parallelism the last stage reports steps while the first one asks for work that lies ahead.
"""

import time
from typing import Any


class StepRecords:
    """Keep records until they are complete. Steps are counted from 0, as in the batches; a record counts from 1."""

    def __init__(self, *, first_step: int, time_s: float) -> None:
        self._start = time.monotonic() - time_s
        self._next_step = first_step
        self._statistics: dict[int, dict[str, Any]] = {}  # of steps without a record yet
        self._reported: dict[int, dict[str, Any]] = {}  # of these, the ones that wait for an earlier step

    @property
    def time_s(self) -> float:
        """Return the run's age; a resumed run goes on where the checkpoint was made."""
        return time.monotonic() - self._start

    @property
    def first_open(self) -> int | None:
        """Return the first step that was handed out and has no record, from 0; None if each has one."""
        return min(self._statistics, default=None)

    @property
    def is_complete(self) -> bool:
        """True when every step that was handed out has its record."""
        return not self._statistics

    def open(self, step: int, statistics: dict[str, Any]) -> None:
        """Note that a step is handed out."""
        self._statistics[step] = statistics

    def report(self, step: int, metrics: dict[str, Any]) -> list[dict[str, Any]]:
        """Note that a step is done. Returns: the records that are due now."""
        self._reported[step] = {"time_s": self.time_s, **metrics}
        records = []
        while self._next_step in self._reported:
            step, self._next_step = self._next_step, self._next_step + 1
            numbers = {"step": step + 1, "policy_version": step + 1}
            records.append({**numbers, **self._statistics.pop(step), **self._reported.pop(step)})
        return records
