"""Account for the groups of each optimizer step: counted, recorded as rollouts, summed up in the step's record.

In: groups as they come in, closed steps, the trainers' metrics. Out: records, and the reason why a run must not go on.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from coati_rl.data.batcher import ClosedStep
from coati_rl.data.kept_rollouts import KeptRollouts
from coati_rl.data.position import Position
from coati_rl.data.rollout_statistics import rollout_statistics
from coati_rl.data.settings import CoordinatorSettings
from coati_rl.data.step_counts import StepCounts
from coati_rl.data.step_records import StepRecords
from coati_rl.observability.rollouts import RolloutRecorder


class StepBook:
    """Under the coordinator's lock."""

    def __init__(
        self, settings: CoordinatorSettings, start: Position, recorder: RolloutRecorder, kept: KeptRollouts
    ) -> None:
        """`kept`: rollouts that the checkpoint of `start` holds."""
        self.counts = StepCounts(settings, start, kept)
        self.records = StepRecords(first_step=start.step, time_s=start.time_s)
        self._rules = settings.batch.rules
        self._recorder = recorder
        self._unwritten: dict[int, ClosedStep] = {}  # of steps without a record yet, and the groups dropped before them

    def close(self, step: int, closed: ClosedStep, *, staleness: Callable[[int], int], sync_s: float) -> None:
        """A step is handed out whole.

        Args:
            step: from 0.
            closed: what it is made of.
            staleness: policy version -> weight syncs since.
            sync_s: what the last transfer of weights took.
        """
        counts, dropped = self.counts.take(closed.groups)
        statistics = rollout_statistics(closed.groups, dropped, rules=self._rules, staleness=staleness)
        extra: dict[str, Any] = {**counts, "sync_s": sync_s}
        self.records.open(step, {**statistics, **extra})
        self._unwritten[step] = replace(closed, groups=[*closed.groups, *dropped])

    def report(self, step: int, metrics: dict[str, Any]) -> list[dict[str, Any]]:
        """A step is done. Returns: the records that are due now; their rollouts are written.

        Not when the step is handed out, since the trainers would wait for it.
        """
        records = self.records.report(step, metrics)
        for record in records:
            closed = self._unwritten.pop(record["step"] - 1)
            self._recorder.write(record["step"], closed.groups, advantages=closed.advantages)
        return records
