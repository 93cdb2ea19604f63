"""Decide when a checkpoint is written, and what it says of the data.

A save that is due waits for rollouts that the resumed run would sample with other weights than this one. After a weight
sync these are the prompts leased before it: those leased since are sampled by the checkpoint's weights in both runs.
Between two syncs the engines serve weights that no checkpoint holds, so that all that they are to sample comes first.
"""

from dataclasses import replace
from typing import Any

from coati_rl.data.cursor import PromptCursor
from coati_rl.data.evaluation import EvaluationBoard
from coati_rl.data.kept_rollouts import FinishedGroup, KeptRollouts
from coati_rl.data.membership import Membership
from coati_rl.data.position import Position, data_state
from coati_rl.data.prompt_flow import PromptFlow
from coati_rl.data.settings import CoordinatorSettings
from coati_rl.data.step_book import StepBook
from coati_rl.data.work import SaveWork


class CheckpointSaves:
    """Under the coordinator's lock, between two optimizer steps."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        start: Position,
        cursor: PromptCursor,
        flow: PromptFlow,
        members: Membership,
        board: EvaluationBoard,
        book: StepBook,
    ) -> None:
        self._settings = settings
        self._cursor = cursor
        self._flow = flow
        self._members = members
        self._board = board
        self._book = book
        self._last_saved = start.step

    def is_due(self, *, is_over: bool) -> bool:
        """True if the present step's checkpoint is wanted, and not handed out yet."""
        interval, step = self._settings.save_interval, self._flow.step
        return (is_over or (interval is not None and step % interval == 0)) and step > self._last_saved

    @property
    def is_ready(self) -> bool:
        """True if a run resumed from a checkpoint of now samples every prompt with the weights that it has here."""
        if self._settings.inflight_update:
            return True  # which weights sample a token depends on time in any case
        if self._members.published_version == self._flow.step:
            return self._flow.is_sampled_before(self._members.sync_index)
        return self._flow.has_sampled_all_slots() and not self._board.is_running

    def take(self) -> list[SaveWork]:
        """The checkpoint of the present step, for every dp rank; the first one writes the rollouts."""
        self._last_saved = step = self._flow.step
        known: dict[str, Any] = {"last_evaluated": self._board.last_finished, "time_s": self._book.records.time_s}
        known |= self._book.counts.dropped()
        work = SaveWork(step=step, data_state=data_state(replace(self._flow.position(), **known), self._cursor.order))
        rollouts = self._kept().to_bytes()
        return [replace(work, rollouts=rollouts), *[work] * (self._settings.batch.dp - 1)]

    def _kept(self) -> KeptRollouts:
        counts, now = self._book.counts, self._members.sync_index
        finished = [
            FinishedGroup(group=each.group, sync_index=each.sync_index - now) for each in self._flow.finished
        ]
        versions = {int(v) for each in finished for c in each.group.completions for v in set(c.policy_versions.tolist())}
        return KeptRollouts(
            finished=tuple(finished),
            dropped=tuple(counts.dropped_groups),
            samples_failed=counts.failed_in_kept,
            sync_index_of={version: -self._members.staleness(version) for version in versions},
        )
