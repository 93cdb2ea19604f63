"""Decide when a checkpoint is written, and what state of the data it holds.

A resumed run must sample every prompt with the policy version that sampled it here. So a checkpoint is due at a weight
sync, when the engines serve its weights, and waits for the prompts that were leased before; those leased since are
sampled with the same weights in both runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from coati_rl.batching.packed_group import as_packed
from coati_rl.checkpoint.position import Position, data_state
from coati_rl.checkpoint.untrained_rollouts import FinishedGroup, UntrainedRollouts
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.membership import Membership
from coati_rl.coordinator.prompt_flow import PromptFlow
from coati_rl.coordinator.prompt_queue import PromptQueue
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.coordinator.step_stats import StepStats
from coati_rl.text import count
from coati_rl.work import SaveWork, Wait, Work


class CheckpointSchedule:
    """Schedule the checkpoints of a run; called under the coordinator's lock, between two optimizer steps."""

    KEPT: ClassVar = ("_last_saved", "being_written")

    def __init__(
        self,
        settings: CoordinatorSettings,
        start: Position,
        queue: PromptQueue,
        flow: PromptFlow,
        members: Membership,
        evaluation: EvaluationRounds,
        stats: StepStats,
        identities: Mapping[int, str],
    ) -> None:
        """Store the arguments; `identities`: of weights, by policy version, as syncs add them."""
        self._settings = settings
        self._queue = queue
        self._flow = flow
        self._members = members
        self._evaluation = evaluation
        self._stats = stats
        self._identities = identities
        self._last_saved = start.step
        self.being_written: int | None = None  # step of the checkpoint that the trainers write

    @property
    def has_unsaved_step(self) -> bool:
        """Return True if no checkpoint holds the current weights."""
        return self._flow.step > self._last_saved

    def is_due(self, *, is_over: bool) -> bool:
        """Return True at the first weight sync after a multiple of the interval, and at the end of the run."""
        interval, step = self._settings.save_interval, self._flow.step
        if not self.has_unsaved_step or self._members.published_version != step:
            return False
        return is_over or (interval is not None and step // interval > self._last_saved // interval)

    @property
    def wait(self) -> Wait | None:
        """Return what a due checkpoint waits for; None if all leased prompts are sampled with its own weights.

        With --inflight-update and --partial-rollouts weights change within a response, so that this cannot be
        guaranteed anyway.
        """
        num_older = self._flow.num_leased_before(self._members.sync_index)
        if self._settings.sync.commits_in_flight or num_older == 0:
            return None
        older = f"{count(num_older, 'prompt')} that older weights sample"
        return Wait(reason=f"waiting for {older}, before the checkpoint of step {self._flow.step}")

    def take(self) -> "SaveNote":
        """Begin the checkpoint of the current step. Returns: what it holds of the data."""
        self._last_saved = self.being_written = step = self._flow.step
        counts, now = self._stats.counts, self._members.sync_index
        known: dict[str, Any] = {"last_evaluated": self._evaluation.last_finished, "time_s": self._stats.records.time_s}
        known |= counts.dropped()
        finished = [FinishedGroup(group=each.group, sync_index=each.sync_index - now) for each in self._flow.finished]
        versions = {version for each in finished for version, _ in as_packed(each.group).policy_versions}
        untrained = UntrainedRollouts(
            finished=tuple(finished),
            dropped=tuple(counts.dropped_groups),
            samples_failed=counts.failed_in_untrained,
            sync_index_of={version: -self._members.staleness(version) for version in versions},
            identities={version: self._identities[version] for version in versions & self._identities.keys()},
        )
        return SaveNote(step=step, position=replace(self._flow.position(), **known), untrained=untrained)

    def work(self, note: "SaveNote") -> list[Work]:
        """Return the items of a checkpoint, one for each dp rank; needs no lock, and takes time."""
        work = SaveWork(step=note.step, data_state=data_state(note.position, self._queue.order))
        rollouts = note.untrained.to_bytes()
        return [replace(work, rollouts=rollouts), *[work] * (self._settings.batch.dp - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveNote:
    """Say what a checkpoint holds of the data."""

    step: int  # optimizer steps taken
    position: Position
    untrained: UntrainedRollouts
