"""Track every training prompt: in the dataset, leased, finished, in the step that is being filled, or settled (that is
trained, or dropped). In: draws and finished groups. Out: the mini-batches of the next optimizer step.

A slot is taken when a prompt is leased. A trained group's slot is freed when all producers hold the weights of its
rollout step; a dropped group's at once, and another prompt is drawn in its place.

Staleness is bounded by construction: a prompt leased after sync s is trained before sync s + n_behind + 1. Slots alone
do not see to that, as short responses may overtake a long one; so a mini-batch is put together only if there is room
left, in this rollout step and those to come, for every older prompt that is still out.
"""

from collections.abc import Sequence

from coati_rl.algorithms.registry import load_estimator
from coati_rl.batch import MiniBatch
from coati_rl.data.batcher import ClosedStep, StepBatcher
from coati_rl.data.kept_rollouts import FinishedGroup
from coati_rl.data.leases import LeaseBook
from coati_rl.data.position import Position
from coati_rl.data.prompt_queue import PromptQueue
from coati_rl.data.settings import CoordinatorSettings
from coati_rl.types import Prompt, RolloutGroup


class PromptFlow:
    """Under the coordinator's lock."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        queue: PromptQueue,
        leases: LeaseBook,
        start: Position,
        kept: Sequence[FinishedGroup] = (),
    ) -> None:
        """`kept`: groups that the checkpoint of `start` holds."""
        self._settings = settings
        self._queue = queue
        self._leases = leases
        self._estimator = load_estimator(settings.batch.advantage_estimator)
        self._finished: list[FinishedGroup] = [*kept]
        self._batcher: StepBatcher | None = None  # of the step that is being filled
        self._in_step: list[FinishedGroup] = []  # its groups
        # A resumed run has groups to train before its producers are there, but the slots that are free then are for the
        # checkpoint's weights, which go with the first optimizer step.
        self._awaits_leases = bool(kept)
        # Groups that hold a slot until the next sync. Producers of a resumed run may not run further ahead of it.
        self._num_trained_unsynced = start.step % settings.sync_period * settings.batch.prompts_per_step
        self.step = start.step  # optimizer steps handed out
        self.is_stopped = False  # by the user, before the run is over

    @property
    def is_between_steps(self) -> bool:
        """True when no prompt is in a step that is being filled."""
        return self._batcher is None

    @property
    def num_finished(self) -> int:
        """Groups that wait to be trained."""
        return len(self._finished)

    def may_draw(self) -> bool:
        """True if a new prompt has a slot and will be needed."""
        if self.is_stopped:
            return False
        ahead = self._leases.num_open("train") + len(self._finished)
        if ahead + self._num_trained_unsynced >= self._settings.num_slots or not self._queue.has_more:
            return False
        if self._settings.max_steps is None:
            return True
        needed = (self._settings.max_steps - self.step) * self._settings.batch.prompts_per_step
        return needed > ahead + self._num_in_step

    def draw(self) -> Prompt | None:
        """A prompt that `may_draw` allows."""
        return self._queue.draw() if self.may_draw() else None

    def add(self, group: RolloutGroup, *, sync_index: int) -> None:
        """A group to be trained, leased after this sync."""
        self._finished.append(FinishedGroup(group=group, sync_index=sync_index))

    def is_over(self) -> bool:
        """True when no further optimizer step can be filled, or none is wanted."""
        if self.is_stopped:
            return True
        if self._settings.max_steps is not None and self.step >= self._settings.max_steps:
            return True
        if self._queue.has_more or self._leases.num_open("train"):
            return False
        return len(self._finished) + self._num_in_step < self._settings.batch.prompts_per_step

    def give_up_step(self) -> None:
        """A step that will never be full is not taken."""
        self._finished.extend(self._in_step)
        self._batcher, self._in_step = None, []

    def next_mini_batch(self, sync_index: int) -> list[MiniBatch] | None:
        """One share per dp rank; None while there are too few groups, or another prompt has to come first.

        Args:
            sync_index: of the trainers' weights.
        """
        size = self._settings.batch.prompts_per_mini_batch
        self._awaits_leases = self._awaits_leases and self.may_draw()
        if self._awaits_leases or len(self._finished) < size:
            return None
        if not self._leaves_room(size, sync_index):
            return None
        if self._batcher is None:
            self._batcher = self._begin_step()
        batches = self._batcher.add([finished.group for finished in self.finished[:size]])
        self._in_step += self._finished[:size]
        del self._finished[:size]
        self._num_trained_unsynced += size
        return batches

    def _leaves_room(self, size: int, sync_index: int) -> bool:
        """True if all prompts that are out can still be trained in time once the first `size` finished ones are."""
        settings = self._settings
        room = settings.prompts_per_rollout - self._num_trained_unsynced - size
        leased_at = [finished.sync_index for finished in self.finished[size:]] + self._leases.sync_indices("train")
        for syncs_left in range(settings.n_behind):  # before the prompts that were leased then would be too old
            num_due = sum(sync_index - at >= settings.n_behind - syncs_left for at in leased_at)
            if num_due > room + syncs_left * settings.prompts_per_rollout:
                return False
        return True

    def close_step(self) -> ClosedStep:
        """Note that the step is handed out whole, and return what it is made of."""
        assert self._batcher is not None, "its last mini-batch was just added"  # noqa: S101
        closed = self._batcher.close()
        self._batcher, self._in_step = None, []
        self.step += 1
        return closed

    def free_slots(self) -> None:
        """All producers hold the weights of this step."""
        self._num_trained_unsynced = 0

    @property
    def finished(self) -> Sequence[FinishedGroup]:
        """Return what waits to be trained, the oldest lease first."""
        self._finished.sort(key=lambda finished: finished.group.lease_id)
        return self._finished

    def is_sampled_before(self, sync_index: int) -> bool:
        """True if no prompt is out that was leased before this sync."""
        return all(at >= sync_index for at in self._leases.sync_indices("train"))

    def position(self) -> Position:
        """Return where the data stands, between two steps."""
        waiting = [*(prompt.uid for prompt in self._queue.waiting), *self._leases.uids("train")]
        kept = [finished.group.prompt.uid for finished in self.finished]
        return Position(step=self.step, num_drawn=self._queue.num_drawn, waiting=tuple(waiting), kept=tuple(kept))

    def _begin_step(self) -> StepBatcher:
        num_out = len(self._queue.waiting) + self._leases.num_open("train") + len(self._finished)
        num_settled = self._queue.num_drawn - num_out
        progress = self._settings.learning_rate_progress(
            step=self.step, num_settled=num_settled, num_prompts=self._queue.length
        )
        return StepBatcher(
            self._settings.batch, step=self.step, learning_rate_progress=progress, estimator=self._estimator
        )

    @property
    def _num_in_step(self) -> int:
        return len(self._in_step)
