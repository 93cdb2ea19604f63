"""Track every training prompt: in the source, leased, finished, in the current step, or done (trained or dropped).

A slot is taken when a prompt is leased. A trained group's slot is freed when all producers hold the weights of its
rollout step; a dropped group's at once, and another prompt is drawn instead.

Staleness is bounded by construction: a prompt leased after sync s is trained before sync s + n_behind + 1. Slots alone
do not guarantee that, as short responses may finish before a long one; so a mini-batch is chosen only if enough slots
are left, in this rollout step and the next ones, for every older prompt that is still leased.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coati_rl.batching.batcher import StepBatcher
from coati_rl.checkpoint.position import Position
from coati_rl.checkpoint.untrained_rollouts import FinishedGroup
from coati_rl.coordinator.batch_updates import BatchUpdates
from coati_rl.coordinator.leases import LeaseTable
from coati_rl.coordinator.prompt_queue import PromptQueue
from coati_rl.coordinator.settings import CoordinatorSettings
from coati_rl.coordinator.step_plans import StepPlans
from coati_rl.text import count
from coati_rl.types import Prompt, RolloutGroup
from coati_rl.work import Wait


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenGroups:
    """Hold the groups of the next mini-batch, and the batcher that builds it."""

    step: int  # optimizer step, from 0
    number: int  # of the mini-batch in the step, from 0
    batcher: StepBatcher  # of the step; used by the holder of the chosen groups alone
    groups: Sequence[RolloutGroup]
    of_step: Sequence[RolloutGroup]  # all of the step's so far
    is_last: bool  # True for the step's last mini-batch


class PromptFlow:
    """Track training prompts; called under the coordinator's lock."""

    KEPT: ClassVar = ("_finished", "_in_step", "_awaits_leases", "_num_trained_unsynced", "is_stopped")

    def __init__(
        self,
        settings: CoordinatorSettings,
        queue: PromptQueue,
        leases: LeaseTable,
        start: Position,
        untrained: Sequence[FinishedGroup] = (),
    ) -> None:
        """Begin at a position; `untrained` are the untrained groups of its checkpoint."""
        self._settings = settings
        self._queue = queue
        self._leases = leases
        self._finished: list[FinishedGroup] = [*untrained]
        self._batcher: StepBatcher | None = None  # of the step that is being filled
        self._in_step: list[FinishedGroup] = []  # its groups
        self.plans = StepPlans(settings.batch)
        # A resumed run has groups to train before its producers have started, but its free slots have to be leased
        # with the checkpoint's weights, which the first optimizer step replaces.
        self._awaits_leases = bool(untrained)
        # Groups that hold a slot until the next sync; restored on resume, so that producers run no further ahead.
        num_batches = start.step % settings.sync_period // settings.updates_per_batch
        self._num_trained_unsynced = num_batches * settings.batch.prompts_per_step
        self.updates = BatchUpdates(settings, first_step=start.step)
        self.is_stopped = False  # by the user, before the run is over
        # Trainers wait for prompts that were leased after this sync or an earlier one, lest any gets too stale; None:
        # they do not.
        self.overdue_sync: int | None = None

    @property
    def step(self) -> int:
        """Return the number of optimizer steps given to the trainers."""
        return self.updates.step

    @property
    def is_between_steps(self) -> bool:
        """Return True when no step is partly filled."""
        return self._batcher is None

    @property
    def num_finished(self) -> int:
        """Return the number of groups that wait to be trained."""
        return len(self._finished)

    @property
    def is_rolled_out(self) -> bool:
        """Return True when no training prompt is being sampled and none may be drawn: a rollout step is finished."""
        return not self._leases.num_open("train") and self.refusal() is not None

    @property
    def has_mini_batch(self) -> bool:
        """Return True if groups for another mini-batch are finished."""
        return len(self._finished) >= self._settings.batch.prompts_per_mini_batch

    def refusal(self) -> str | None:
        """Return why no new prompt may be drawn; None if one has a slot and is needed."""
        if self.is_stopped:
            return "the run was interrupted"
        if not self._queue.has_more:
            return f"no prompts are left: all {self._queue.length} were drawn"
        leased, settings = self._leases.num_open("train"), self._settings
        ahead = leased + len(self._finished)
        if ahead + self._num_trained_unsynced >= settings.num_slots:
            return (
                f"no free slots: all {settings.num_slots} are taken ({count(leased, 'prompt')} being sampled, "
                f"{count(len(self._finished), 'group')} finished, {self._num_trained_unsynced} trained since the last "
                "weight sync)"
            )
        if settings.max_steps is None:
            return None
        num_batches = settings.max_steps // settings.updates_per_batch - self.updates.num_batches
        needed = num_batches * settings.batch.prompts_per_step
        if needed > ahead + len(self._in_step):
            return None
        return f"no further prompt is needed: there are enough for all {settings.max_steps} steps"

    def draw(self) -> Prompt | None:
        """Return the next prompt, if one may be drawn."""
        return self._queue.draw() if self.refusal() is None else None

    def add(self, group: RolloutGroup, *, sync_index: int) -> None:
        """Add a group to be trained, leased after this sync."""
        self._finished.append(FinishedGroup(group=group, sync_index=sync_index))

    def recover(self, group: RolloutGroup, *, sync_index: int) -> None:
        """Add a group of the ledger, after a resume."""
        self.add(group, sync_index=sync_index)
        self._awaits_leases = True

    def is_over(self) -> bool:
        """Return True when no further batch can be filled, or none is to be."""
        if self.is_stopped:
            return True
        settings, num_batches = self._settings, self.updates.num_batches
        if settings.max_steps is not None and num_batches * settings.updates_per_batch >= settings.max_steps:
            return True
        if self._queue.has_more or self._leases.num_open("train"):
            return False
        return len(self._finished) + len(self._in_step) < self._settings.batch.prompts_per_step

    def cancel_step(self) -> None:
        """Return the groups of a step that cannot be filled to the finished ones."""
        self._finished.extend(self._in_step)
        self._batcher, self._in_step = None, []

    def choose_groups(self, sync_index: int) -> ChosenGroups | Wait:
        """Return the groups of the next mini-batch, or a Wait if they are too few or an older prompt comes first.

        Args:
            sync_index: number of completed weight syncs.
        """
        size, step = self._settings.batch.prompts_per_mini_batch, self.step
        self._awaits_leases = self._awaits_leases and self.refusal() is None
        if self._awaits_leases:
            return Wait(reason="waiting for producers to lease prompts for the slots that the checkpoint left free")
        if not self.has_mini_batch:
            return self._wait_for_rollouts()
        self.overdue_sync = self._find_overdue(size, sync_index)
        if self.overdue_sync is not None:
            bound = f"before the weights change again (--n-behind {self._settings.sync.n_behind})"
            return Wait(reason=f"waiting for an older prompt, to be trained {bound}: {self._sampling()}")
        if self._batcher is None:
            self._batcher = self.plans.begin(step, learning_rate_progress=self.learning_rate_progress())
        batcher, chosen = self._batcher, [*self.finished[:size]]
        self._in_step += chosen
        del self._finished[:size]
        self._num_trained_unsynced += size
        of_step = [finished.group for finished in self._in_step]
        if is_last := len(of_step) >= self._settings.batch.prompts_per_step:
            self._batcher, self._in_step = None, []
            self.updates.add_batch()
        groups = [finished.group for finished in chosen]
        number = self.plans.add(step, groups)
        return ChosenGroups(step=step, number=number, batcher=batcher, groups=groups, of_step=of_step, is_last=is_last)

    @property
    def used_plan(self) -> set[int]:
        """Return the step that is being filled, from 0, if there is one."""
        return set() if self._batcher is None else {self.step}

    def reopen_step(self) -> None:
        """Go on with the step that another coordinator was filling."""
        if self._in_step:
            self._batcher, _ = self.plans.replay(self.step)

    def wait_for_rollout_step(self) -> Wait:
        """Return what trainers wait for that are to get the groups of a whole rollout step."""
        num_wanted = self._settings.prompts_per_rollout - self._num_trained_unsynced
        groups = f"{len(self._finished)} of {num_wanted} groups of the rollout step are finished"
        return Wait(reason=f"the producers have the devices: {groups}, {self._sampling()}")

    def free_slots(self) -> None:
        """Free the slots of trained groups, as all producers hold the weights of this step."""
        self._num_trained_unsynced = 0
        self.updates.end_rollout_step()

    @property
    def finished(self) -> Sequence[FinishedGroup]:
        """Return the groups that wait to be trained, the oldest lease first."""
        self._finished.sort(key=lambda finished: finished.group.lease_id)
        return self._finished

    def num_leased_before(self, sync_index: int) -> int:
        """Return the number of open leases from before this sync."""
        return sum(at < sync_index for at in self._leases.sync_indices("train"))

    def position(self) -> Position:
        """Return the position in the data, between two steps."""
        waiting = [*(prompt.uid for prompt in self._queue.waiting), *self._leases.uids("train")]
        kept = [finished.group.prompt.uid for finished in self.finished]
        return Position(step=self.step, num_drawn=self._queue.num_drawn, waiting=tuple(waiting), kept=tuple(kept))

    def _find_overdue(self, size: int, sync_index: int) -> int | None:
        """Return None if all leased prompts can still be trained in time after the first `size` finished ones.

        Else the prompts that were leased after the returned sync, or an earlier one, have to come first.
        """
        settings = self._settings
        free = settings.prompts_per_rollout - self._num_trained_unsynced - size
        leased_at = [finished.sync_index for finished in self.finished[size:]] + self._leases.sync_indices("train")
        for syncs_left in range(settings.sync.n_behind):  # before the prompts leased then would be too stale
            due_at = sync_index - settings.sync.n_behind + syncs_left
            num_due = sum(at <= due_at for at in leased_at)
            if num_due > free + syncs_left * settings.prompts_per_rollout:
                return due_at
        return None

    def learning_rate_progress(self) -> float:
        """Return the completed fraction of the run before the next optimizer step, in [0, 1]."""
        settings = self._settings
        num_out = len(self._queue.waiting) + self._leases.num_open("train") + len(self._finished)
        # A batch with updates to come is done in part.
        num_undone = self.updates.num_due * settings.batch.prompts_per_step / settings.updates_per_batch
        num_done = self._queue.num_drawn - num_out - num_undone
        return settings.learning_rate_progress(step=self.step, num_done=num_done, num_prompts=self._queue.length)

    def _wait_for_rollouts(self) -> Wait:
        num_there = len(self._finished) + len(self._in_step)
        groups = f"{num_there} of {self._settings.batch.prompts_per_step} groups of step {self.step + 1} are finished"
        return Wait(reason=f"waiting for rollouts: {groups}, {self._sampling()}")

    def _sampling(self) -> str:
        num_lost, holders = self._leases.num_lost("train"), self._leases.holders("train")
        num_held = self._leases.num_open("train") - num_lost
        text = f"{count(num_held, 'prompt')} {'is' if num_held == 1 else 'are'} being sampled"
        text += f" by {count(len(holders), 'producer')}" if holders else ""
        return text + (f", {count(num_lost, 'prompt')} of a lost producer will be sampled again" if num_lost else "")
