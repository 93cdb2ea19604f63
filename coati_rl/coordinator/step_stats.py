"""Count the groups of each optimizer step as they are received, and build the step's record with its rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coati_rl.batching.batcher import ClosedStep
from coati_rl.batching.group_rules import GroupRules
from coati_rl.checkpoint.position import Position
from coati_rl.checkpoint.untrained_rollouts import UntrainedRollouts
from coati_rl.coordinator.batch_updates import LaterUpdate
from coati_rl.coordinator.group_counts import GroupCounts
from coati_rl.coordinator.rollout_statistics import rollout_statistics
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.coordinator.step_records import StepRecords
from coati_rl.types import RolloutGroup

# The same for each of a batch's updates.
_OF_THE_BATCH = ("samples_in_loss", "samples_computed", "staleness_mean", "staleness_max")
# Of what came in for a step, which is counted with a batch's first update.
_COUNTED_ONCE = (
    "groups_total",
    "groups_filtered",
    "groups_all_correct",
    "groups_all_wrong",
    "samples_failed",
    "samples_invalid",
    "num_prompt_tokens",
    "num_response_tokens",
    "sync_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSummary:
    """Describe the rollouts of a step that is about to start."""

    step: int  # from 0
    statistics: dict[str, Any]  # by the names of metrics.jsonl
    closed: ClosedStep  # with the groups that were dropped before it


@dataclass(frozen=True, kw_only=True, slots=True)
class StepDraft:
    """Hold the counts of a step at the time its groups are chosen."""

    step: int
    counts: dict[str, Any]  # by the names of metrics.jsonl
    dropped: Sequence[RolloutGroup]  # since the last step
    rules: GroupRules
    tasks: Sequence[str] = ()  # of the run, if there are several

    def summarise(self, closed: ClosedStep, *, staleness: Callable[[int], int]) -> StepSummary:
        """Add the statistics; takes time, and needs no lock.

        Args:
            closed: the step's content.
            staleness: policy version -> weight syncs since.
        """
        statistics = rollout_statistics(
            closed.groups, self.dropped, rules=self.rules, staleness=staleness, tasks=self.tasks
        )
        whole = replace(closed, groups=[*closed.groups, *self.dropped])
        computed = {"samples_computed": closed.num_computed}
        return StepSummary(step=self.step, statistics={**statistics, **computed, **self.counts}, closed=whole)


class StepStats:
    """Keep the counts and records of steps; called under the coordinator's lock."""

    def __init__(self, settings: CoordinatorSettings, start: Position, untrained: UntrainedRollouts) -> None:
        """Begin at a position; `untrained` are the untrained rollouts of its checkpoint."""
        self.counts = GroupCounts(settings, start, untrained)
        self.records = StepRecords(first_step=start.step, time_s=start.time_s)
        self._rules = settings.batch.rules
        self._tasks = settings.tasks
        self._num_trained = settings.batch.prompts_per_step
        # Of steps whose rollouts are not written yet, and the groups dropped before them.
        self._closed: dict[int, ClosedStep] = {}
        self._has_later_updates = settings.updates_per_batch > 1
        self._of_batches: dict[int, dict[str, Any]] = {}  # first step of a batch with updates to come: its statistics

    def draft(self, step: int, groups: Sequence[RolloutGroup], *, sync_s: float) -> StepDraft:
        """Take the counts for a step whose groups are chosen, and reset them.

        Args:
            step: from 0.
            groups: all of the step's.
            sync_s: duration of the last transfer of weights.
        """
        counts, dropped = self.counts.take(groups)
        return self.redraft(step, {**counts, "sync_s": sync_s}, dropped)

    def open(self, summary: StepSummary) -> None:
        """Begin the record of a step that is given to the trainers, the first one of its batch."""
        statistics = summary.statistics
        if self._has_later_updates:
            statistics = self._of_batches[summary.step] = {"update": 0, **statistics}
        self.records.open(summary.step, statistics)
        self._closed[summary.step] = summary.closed

    def open_update(self, update: LaterUpdate) -> None:
        """Begin the record of a later step on a batch, for which nothing came in."""
        first = self._of_batches.pop(update.first_step) if update.is_last else self._of_batches[update.first_step]
        nothing = {name: 0 if name in _COUNTED_ONCE else None for name in first}
        of_batch = {name: first[name] for name in _OF_THE_BATCH}
        self.records.open(update.step, {**nothing, **of_batch, "update": update.number})

    def closed(self, step: int) -> ClosedStep | None:
        """Return the rollouts of a step, from 0, that are not written yet; None for a later update of a batch."""
        return self._closed.get(step)

    def written(self, step: int) -> None:
        """Drop the rollouts of a step, from 0, which are written."""
        self._closed.pop(step, None)

    def redraft(self, step: int, counts: dict[str, Any], dropped: Sequence[RolloutGroup]) -> StepDraft:
        """Return the draft of a step whose counts were taken."""
        return StepDraft(step=step, counts=counts, dropped=dropped, rules=self._rules, tasks=self._tasks)

    def kept(self) -> dict[str, Any]:
        """Return what `restore` takes: of a closed step the groups that were dropped before it."""
        dropped = {step: [*closed.groups[self._num_trained :]] for step, closed in self._closed.items()}
        return {"dropped": dropped, "of_batches": self._of_batches}

    def restore(self, values: dict[str, Any], replay: Callable[[int], ClosedStep]) -> None:
        """Restore what another coordinator has kept; `replay` closes a step, from 0, again."""
        self._of_batches = values["of_batches"]
        for step, dropped in values["dropped"].items():
            closed = replay(step)
            self._closed[step] = replace(closed, groups=[*closed.groups, *dropped])
