"""Decide the trainers' next item of work, or return what it waits for: the trainers' side of the coordinator.

A decision is an `Assembly`, which makes the item without the lock, or a `Wait` with its reason. It is made once for all
ranks, and changes the state as if the item existed already.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from coati_rl.batching.batcher import ClosedStep
from coati_rl.coordinator.checkpoint_schedule import SaveNote
from coati_rl.coordinator.run_state import RunState
from coati_rl.coordinator.step_stats import StepDraft, StepSummary
from coati_rl.errors import RunError
from coati_rl.samples import RaggedBatch
from coati_rl.types import RolloutGroup
from coati_rl.work import FinishWork, HandOverWork, ProbeWork, RepeatWork, SyncWork, TrainWork, Wait, Work


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainNote:
    """Say which mini-batch an item is; the step's plan has its groups."""

    step: int  # optimizer step, from 0
    number: int  # of the mini-batch in the step, from 0
    is_corrected: bool
    counts: dict[str, Any] | None  # of the step, with its last mini-batch
    dropped: Sequence[RolloutGroup] = ()  # before the step


Note = SyncWork | ProbeWork | HandOverWork | RepeatWork | FinishWork | SaveNote | TrainNote


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembly:
    """Hold a decision, and the two functions that make its item."""

    note: Note  # from which another coordinator makes the same item
    make: Callable[[], Sequence[Work]]  # one item per dp rank; needs no lock, takes time
    then: Callable[[], None] = lambda: None  # under the lock, before a trainer has the item


class Scheduler:
    """Decide one item after another; called under the coordinator's lock."""

    KEPT: ClassVar = ("_is_corrected",)

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._dp = state.settings.batch.dp
        self._is_corrected = False  # the loss of the current rollout step corrects for the mismatch
        self._evaluate_if_due(is_over=False)

    def decide(self, index: int) -> Assembly | Wait:
        """Decide item `index`. Raises: RunError if the run ends without an optimizer step."""
        state = self._state
        state.flow.overdue_sync = None
        if (wait := state.syncs.transfer) is not None:
            return wait
        if state.is_finished:
            return Wait(reason="the run is over")
        if is_over := state.flow.is_over():
            state.flow.cancel_step()
        if state.turns.is_of_producers:
            return self._producers_turn(is_over=is_over)
        if (update := self._later_update(is_over=is_over)) is not None:
            return update
        if state.flow.is_stopped:
            return self._save() if state.checkpoint_schedule.has_unsaved_step else self._finish()
        if (probe := state.syncs.next_probe()) is not None:
            return self._same_for_all(probe)
        return (
            self._sync(index, is_over=is_over)
            or self._at_boundary(is_over=is_over)
            or self._trainers_turn(is_over=is_over)
            or self._train_or_end(is_over)
        )

    def _producers_turn(self, *, is_over: bool) -> Assembly | Wait:
        """End the producers' turn on shared devices, or wait for its end; at the end of the run it is the last one."""
        state = self._state
        self._evaluate_if_due(is_over=is_over)
        found = state.turns.end_producers(is_over=is_over)
        if isinstance(found, Wait):
            return found
        is_last = is_over and not (
            state.checkpoint_schedule.has_unsaved_step or state.flow.updates.num_due or state.syncs.has_unscored
        )
        return self._finish() if is_last else self._same_for_all(found)

    def _trainers_turn(self, *, is_over: bool) -> Assembly | None:
        """End the trainers' turn on shared devices, if a sync is not due and nothing left to train; else None."""
        turns = self._state.turns
        is_last = turns.is_of_trainers and turns.is_trained(is_over=is_over)
        return self._same_for_all(turns.end_trainers()) if is_last else None

    def remake(self, note: Note) -> Assembly:
        """Return the assembly of an item that another coordinator has decided."""
        if isinstance(note, SaveNote):
            return self._checkpoint(note)
        if not isinstance(note, TrainNote):
            return self._same_for_all(note)
        batcher, mini_batches = self._state.flow.plans.replay(note.step)
        draft = None
        if note.counts is not None:
            draft = self._state.stats.redraft(note.step, note.counts, note.dropped)
        return self._mini_batch(note, lambda: mini_batches[note.number], draft, batcher.close, written=0)

    def _same_for_all(self, work: SyncWork | ProbeWork | HandOverWork | RepeatWork | FinishWork) -> Assembly:
        return Assembly(note=work, make=lambda: [work] * self._dp)

    def _later_update(self, *, is_over: bool) -> Assembly | None:
        """Train a batch again; all else that may be due comes after the last update of the rollout step's batches."""
        state = self._state
        progress = state.flow.learning_rate_progress()
        if (update := state.flow.updates.next_update(is_over=is_over)) is None:
            return None
        work = RepeatWork(
            step=update.step,
            first_step=update.first_step,
            is_last=update.is_last,
            learning_rate_progress=progress,
            is_corrected=self._is_corrected,
        )
        state.stats.open_update(update)
        return self._same_for_all(work)

    def _sync(self, index: int, *, is_over: bool) -> Assembly | Wait | None:
        """Send weights to producers that need them; return None if all have them and a due sync is complete."""
        state, members, step = self._state, self._state.members, self._state.flow.step
        is_due = state.flow.is_between_steps and members.is_sync_due(step, state.settings.sync_period, is_over=is_over)
        if is_due and state.evaluation.is_running and members.has_current:
            return (
                state.evaluation.wait
            )  # its answers have to be sampled with the current weights, as long as a producer serves them
        stale = members.stale(step if is_due else members.published_version)
        if stale and not members.is_committing and state.turns.may_send(is_due=is_due, is_over=is_over):
            return self._same_for_all(state.syncs.order(index, step, stale))
        if is_due and stale:  # staged weights must not be overwritten
            state.flow.overdue_sync = members.sync_index - 1  # of the prompts that the commit may wait for
            return Wait(reason=f"waiting for {members.committing}, before version {step} is sent")
        if is_due and not members.ids:
            return Wait(reason=f"{members.missing}, for the weight sync to version {step}")
        if is_due:
            members.complete_sync(step)
            state.ledger.version(step)
            self._is_corrected = (
                state.mismatch_monitor.is_corrected
            )  # only here, as within a rollout step the old policy must not change
            state.flow.free_slots()
            state.notify()
        return None

    def _at_boundary(self, *, is_over: bool) -> Assembly | Wait | None:
        """Start an evaluation or a checkpoint that is due between two optimizer steps; return None if none is."""
        state = self._state
        if not state.flow.is_between_steps:
            return None
        self._evaluate_if_due(is_over=is_over)
        if not state.checkpoint_schedule.is_due(is_over=is_over):
            return None
        if (wait := state.checkpoint_schedule.wait) is not None:
            return wait
        if not state.writer.is_idle:  # a checkpoint must not count rollouts that are not in the files
            return Wait(reason=f"waiting for rollouts to be written, before the checkpoint of step {state.flow.step}")
        return self._save()

    def _save(self) -> Assembly:
        state = self._state
        state.ledger.checkpoint(state.flow.position(), state.leases)
        return self._checkpoint(state.checkpoint_schedule.take())

    def _checkpoint(self, note: SaveNote) -> Assembly:
        return Assembly(note=note, make=partial(self._state.checkpoint_schedule.work, note))

    def _train_or_end(self, is_over: bool) -> Assembly | Wait:
        state, members = self._state, self._state.members
        if state.syncs.awaits_routes and members.is_committing:  # the next update changes the weights to score it with
            return Wait(reason=f"waiting for {members.committing} and the experts that its probe was routed to")
        if is_over and state.evaluation.is_running:
            return state.evaluation.wait
        if is_over and members.is_committing:
            return Wait(reason=f"waiting for {members.committing}, the last one")
        if is_over:
            return self._finish()
        if state.evaluation.is_running and members.is_first_awaited:  # a resumed run may have all groups of its step
            return Wait(reason=f"{members.missing}, for the evaluation of step {state.flow.step}")
        chosen = state.flow.choose_groups(members.sync_index)
        if isinstance(chosen, Wait):
            return Wait(reason=f"{members.missing}; {chosen.reason}") if members.missing else chosen
        draft = None
        if chosen.is_last:
            draft = state.stats.draft(chosen.step, chosen.of_step, sync_s=state.syncs.seconds)
        note = TrainNote(
            step=chosen.step,
            number=chosen.number,
            is_corrected=self._is_corrected,
            counts=None if draft is None else draft.counts,
            dropped=() if draft is None else draft.dropped,
        )
        batcher, written = chosen.batcher, state.ledger.in_step(chosen.step, chosen.groups)
        return self._mini_batch(note, partial(batcher.add, chosen.groups), draft, batcher.close, written=written)

    def _mini_batch(
        self,
        note: TrainNote,
        build: Callable[[], Sequence[RaggedBatch]],
        draft: StepDraft | None,
        close: Callable[[], ClosedStep],
        *,
        written: int,
    ) -> Assembly:
        """Make a mini-batch, and with a step's last one its statistics.

        Args:
            note: what it is.
            build: returns it for each dp rank.
            draft: of the step, with its last one.
            close: returns the step's content then.
            written: record of the ledger that has to be on the disk before.
        """
        stats, staleness, ledger = self._state.stats, self._state.members.staleness, self._state.ledger
        summaries: list[StepSummary] = []

        def make() -> list[Work]:
            batches = build()
            ledger.wait_durable(written)
            if draft is not None:  # no sync completes meanwhile, as the next item is not decided yet
                summaries.append(draft.summarise(close(), staleness=staleness))
            return [TrainWork(batch=batch, is_corrected=note.is_corrected) for batch in batches]

        def then() -> None:
            for summary in summaries:
                stats.open(summary)

        return Assembly(note=note, make=make, then=then)

    def _finish(self) -> Assembly:
        state = self._state
        if state.flow.step == 0 and not state.flow.is_stopped:
            raise RunError(state.stats.counts.nothing_trained(state.flow.num_finished))
        state.is_finished = True
        state.send_finished_event()
        return self._same_for_all(FinishWork(step=state.flow.step))

    def _evaluate_if_due(self, *, is_over: bool) -> None:
        state, step = self._state, self._state.flow.step
        is_due = state.evaluation.is_due(step, state.settings.eval_interval, is_over=is_over)
        if is_due and state.members.published_version == step:
            state.evaluation.start(step)
            state.notify()
