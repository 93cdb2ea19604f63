"""Account for the groups of each optimizer step: counted as they come in, summed up in the step's record.

In: groups, the groups chosen for a step, the trainers' metrics. Out: records, the rollouts that belong to each, and the
reason why a run must not go on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coati_rl.checkpoint.kept_rollouts import KeptRollouts
from coati_rl.checkpoint.position import Position
from coati_rl.coordinator.group_counts import GroupCounts
from coati_rl.coordinator.rollout_statistics import rollout_statistics
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.coordinator.step_records import StepRecords
from coati_rl.data.batcher import ClosedStep
from coati_rl.data.group_rules import GroupRules
from coati_rl.types import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """Describe the rollouts of a step that is about to be handed out."""

    step: int  # from 0
    statistics: dict[str, Any]  # by the names of metrics.jsonl
    closed: ClosedStep  # with the groups that were dropped before it


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDraft:
    """Hold what is known of a step when its groups are chosen."""

    step: int
    counts: dict[str, Any]  # by the names of metrics.jsonl
    dropped: Sequence[RolloutGroup]  # since the last step
    rules: GroupRules

    def summarise(self, closed: ClosedStep, *, staleness: Callable[[int], int]) -> StepSummary:
        """Add the statistics; takes time, and no lock.

        Args:
            closed: what the step is made of.
            staleness: policy version -> weight syncs since.
        """
        statistics = rollout_statistics(closed.groups, self.dropped, rules=self.rules, staleness=staleness)
        whole = replace(closed, groups=[*closed.groups, *self.dropped])
        return StepSummary(step=self.step, statistics={**statistics, **self.counts}, closed=whole)


class StepStats:
    """Keep the counts and records of steps; under the coordinator's lock."""

    def __init__(self, settings: CoordinatorSettings, start: Position, kept: KeptRollouts) -> None:
        """`kept`: rollouts that the checkpoint of `start` holds."""
        self.counts = GroupCounts(settings, start, kept)
        self.records = StepRecords(first_step=start.step, time_s=start.time_s)
        self._rules = settings.batch.rules
        self._closed: dict[int, ClosedStep] = {}  # of steps without a record yet, and the groups dropped before them

    def draft(self, step: int, groups: Sequence[RolloutGroup], *, sync_s: float) -> StepDraft:
        """Note that the groups of a step are chosen; counting starts anew.

        Args:
            step: from 0.
            groups: all of the step's.
            sync_s: what the last transfer of weights took.
        """
        counts, dropped = self.counts.take(groups)
        return StepDraft(step=step, counts={**counts, "sync_s": sync_s}, dropped=dropped, rules=self._rules)

    def open(self, summary: StepSummary) -> None:
        """Begin the record of a step that is handed out."""
        self.records.open(summary.step, summary.statistics)
        self._closed[summary.step] = summary.closed

    def report(self, step: int, metrics: dict[str, Any]) -> list[tuple[dict[str, Any], ClosedStep]]:
        """Take the metrics of a step that is done. Returns: the records that are due now, each with its rollouts."""
        records = self.records.report(step, metrics)
        return [(record, self._closed.pop(record["step"] - 1)) for record in records]
