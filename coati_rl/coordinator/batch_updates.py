"""Count the updates of a rollout step's batches, and decide the later ones of each: PPO epochs.

A rollout step trains K batches, each of one optimizer step's groups, between two weight syncs. With N updates per batch
it takes K * N optimizer steps: each batch once, as soon as its groups are there, then all of them again in the same
order, N - 1 times. Trainers keep a batch with its scores from its first update to its last one. At the end of a run,
and where the user stops it, the batches trained so far get the rest of their updates first.
"""

from dataclasses import dataclass
from typing import ClassVar

from coati_rl.coordinator.settings import CoordinatorSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterUpdate:
    """Describe an update of a batch after its first one."""

    step: int  # optimizer step, from 0
    first_step: int  # that trained the batch first
    number: int  # of the update among the batch's, from 1; the first one is 0
    is_last: bool  # of the batch


class BatchUpdates:
    """Number the optimizer steps of a run; called under the coordinator's lock."""

    KEPT: ClassVar = ("_first_step", "_num_batches", "step")

    def __init__(self, settings: CoordinatorSettings, *, first_step: int) -> None:
        """Begin a rollout step, or go on in it with batches that no update was taken on, at `first_step`."""
        self._settings = settings
        self._first_step = first_step  # of the batches below
        self._num_batches = 0  # trained in this rollout step, or since the run was resumed in it
        self.step = first_step  # optimizer steps given to the trainers

    @property
    def num_batches(self) -> int:
        """Return the number of batches that the run has trained at least once."""
        return self._first_step // self._settings.updates_per_batch + self._num_batches

    @property
    def num_due(self) -> int:
        """Return the number of updates that the batches trained so far have yet to get."""
        return self._first_step + self._num_batches * self._settings.updates_per_batch - self.step

    def add_batch(self) -> None:
        """Count a batch whose first update is given to the trainers."""
        self._num_batches += 1
        self.step += 1

    def next_update(self, *, is_over: bool) -> LaterUpdate | None:
        """Take the next update of a batch; None if none is due, or other batches come first.

        Args:
            is_over: True if no other batch will follow.
        """
        period = self._settings.sync_period
        is_filled = (self.step + self.num_due) // period > self._first_step // period
        if self.num_due == 0 or not (is_filled or is_over):
            return None
        number, batch = divmod(self.step - self._first_step, self._num_batches)
        step, self.step = self.step, self.step + 1
        return LaterUpdate(
            step=step,
            first_step=self._first_step + batch,
            number=number,
            is_last=number == self._settings.updates_per_batch - 1,
        )

    def end_rollout_step(self) -> None:
        """Begin the next rollout step, after a weight sync."""
        self._first_step, self._num_batches = self.step, 0
