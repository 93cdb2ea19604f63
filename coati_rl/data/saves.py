"""Decide when a checkpoint is written, and what it says of the data.

A run that is resumed is to sample every prompt with the weights that it is sampled with here. So a checkpoint is due at
a weight sync, when the engines serve its weights, and waits for the prompts that were leased before; those leased since
are sampled with the same weights in both runs.
"""

from dataclasses import replace
from typing import Any

from coati_rl.data.evaluation import EvaluationBoard
from coati_rl.data.kept_rollouts import FinishedGroup, KeptRollouts
from coati_rl.data.membership import Membership
from coati_rl.data.position import Position, data_state
from coati_rl.data.prompt_flow import PromptFlow
from coati_rl.data.prompt_queue import PromptQueue
from coati_rl.data.settings import CoordinatorSettings
from coati_rl.data.step_book import StepBook
from coati_rl.data.work import SaveWork, Work


class CheckpointSaves:
    """Under the coordinator's lock, between two optimizer steps."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        start: Position,
        queue: PromptQueue,
        flow: PromptFlow,
        members: Membership,
        board: EvaluationBoard,
        book: StepBook,
    ) -> None:
        self._settings = settings
        self._queue = queue
        self._flow = flow
        self._members = members
        self._board = board
        self._book = book
        self._last_saved = start.step

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
    def is_ready(self) -> bool:
        """True if no prompt is out that older weights sample, or which weights do depends on time in any case."""
        return self._settings.inflight_update or self._flow.is_sampled_before(self._members.sync_index)

    def take(self) -> list[Work]:
        """The checkpoint of the present step, for every dp rank; the first one writes the rollouts."""
        self._last_saved = step = self._flow.step
        known: dict[str, Any] = {"last_evaluated": self._board.last_finished, "time_s": self._book.records.time_s}
        known |= self._book.counts.dropped()
        work = SaveWork(step=step, data_state=data_state(replace(self._flow.position(), **known), self._queue.order))
        rollouts = self._kept().to_bytes()
        return [replace(work, rollouts=rollouts), *[work] * (self._settings.batch.dp - 1)]

    def _kept(self) -> KeptRollouts:
        counts, now = self._book.counts, self._members.sync_index
        finished = [FinishedGroup(group=each.group, sync_index=each.sync_index - now) for each in self._flow.finished]
        versions = {
            int(v) for each in finished for c in each.group.completions for v in set(c.policy_versions.tolist())
        }
        return KeptRollouts(
            finished=tuple(finished),
            dropped=tuple(counts.dropped_groups),
            samples_failed=counts.failed_in_kept,
            sync_index_of={version: -self._members.staleness(version) for version in versions},
        )
