"""Decide when a checkpoint is written, and what it says of the data.

A run that is resumed is to sample every prompt with the weights that it is sampled with here. So a checkpoint is due at
a weight sync, when the engines serve its weights, and waits for the prompts that were leased before; those leased since
are sampled with the same weights in both runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from coati_rl.checkpoint.kept_rollouts import FinishedGroup, KeptRollouts
from coati_rl.checkpoint.position import Position, data_state
from coati_rl.coordinator.evaluation import EvaluationRounds
from coati_rl.coordinator.membership import Membership
from coati_rl.coordinator.prompt_flow import PromptFlow
from coati_rl.coordinator.prompt_queue import PromptQueue
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.coordinator.step_stats import StepStats
from coati_rl.text import count
from coati_rl.work import SaveWork, Wait, Work


class CheckpointSaves:
    """Follow the checkpoints of a run; under the coordinator's lock, between two optimizer steps."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        start: Position,
        queue: PromptQueue,
        flow: PromptFlow,
        members: Membership,
        board: EvaluationRounds,
        stats: StepStats,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._flow = flow
        self._members = members
        self._board = board
        self._stats = stats
        self._last_saved = start.step
        self.being_written: int | None = None  # step of the checkpoint that the trainers write

    @property
    def has_unsaved_step(self) -> bool:
        """True if no checkpoint holds the present weights."""
        return self._flow.step > self._last_saved

    def is_due(self, *, is_over: bool) -> bool:
        """True at the first weight sync after a multiple of the interval, and at the end of the run."""
        interval, step = self._settings.save_interval, self._flow.step
        if not self.has_unsaved_step or self._members.published_version != step:
            return False
        return is_over or (interval is not None and step // interval > self._last_saved // interval)

    @property
    def wait(self) -> Wait | None:
        """Say what a checkpoint that is due waits for; None if prompts are only out that its own weights sample.

        With weights that change in mid-response, time decides which of them samples a prompt in any case.
        """
        num_older = self._flow.num_leased_before(self._members.sync_index)
        if self._settings.inflight_update or num_older == 0:
            return None
        older = f"{count(num_older, 'prompt')} that older weights sample"
        return Wait(reason=f"waiting for {older}, before the checkpoint of step {self._flow.step}")

    def take(self) -> Callable[[], list[Work]]:
        """Take the checkpoint of the present step. Returns: what makes the work of it, for which no lock is needed."""
        self._last_saved = self.being_written = step = self._flow.step
        counts, now = self._stats.counts, self._members.sync_index
        known: dict[str, Any] = {"last_evaluated": self._board.last_finished, "time_s": self._stats.records.time_s}
        known |= counts.dropped()
        position = replace(self._flow.position(), **known)
        finished = [FinishedGroup(group=each.group, sync_index=each.sync_index - now) for each in self._flow.finished]
        kept = KeptRollouts(
            finished=tuple(finished), dropped=tuple(counts.dropped_groups), samples_failed=counts.failed_in_kept
        )

        def make() -> list[Work]:
            work = SaveWork(step=step, data_state=data_state(position, self._queue.order))
            rollouts = replace(kept, sync_index_of=self._sync_index_of(finished)).to_bytes()
            return [replace(work, rollouts=rollouts), *[work] * (self._settings.batch.dp - 1)]

        return make

    def _sync_index_of(self, finished: Sequence[FinishedGroup]) -> dict[int, int]:
        """Versions that sampled these groups -> syncs since, as a negative number."""
        versions = {version for each in finished for version in set(each.group.policy_versions.tolist())}
        return {version: -self._members.staleness(version) for version in versions}
