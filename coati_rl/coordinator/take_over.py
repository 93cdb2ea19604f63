"""Keep a coordinator's state in its ledger, and go on from there in another process.

Each batch of the ledger ends with the state that its records have led to. Whatever another process acts upon (an item
of work, the answer to a report) is given out after the batch with it is written, so that a coordinator that takes over
knows it. What it may not know are the last half second's leases and groups: each producer says what it holds.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from coati_rl.batching.batcher import ClosedStep
from coati_rl.checkpoint.ledger_files import last_number, read_ledger
from coati_rl.checkpoint.ledger_frames import LedgerError, Record
from coati_rl.checkpoint.ledger_groups import group_from_bytes
from coati_rl.checkpoint.ledger_resume import FINISHED, NAMED, STATE
from coati_rl.coordinator.kept import kept, restore
from coati_rl.coordinator.run_state import RunState
from coati_rl.coordinator.scheduler import Note, Scheduler, TrainNote
from coati_rl.coordinator.state_json import References, from_json, to_json
from coati_rl.types import Prompt, RolloutGroup
from coati_rl.work import WorkList

# Event that the driver records -> where it says its optimizer step, from 1.
STEP_OF = {"step": "step", "evaluation": "step", "sync": "policy_version"}


@dataclass(kw_only=True, slots=True)
class Decided:
    """Hold the decisions about items of work that trainers may still ask for."""

    notes: dict[int, Note] = field(default_factory=dict)  # by the item's number
    assembled: int | None = None  # number of the item that is being made
    number: int = 0  # of its decision in the ledger


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftState:
    """Hold what a coordinator has left."""

    values: Any  # JSON
    groups: Mapping[str, Record]  # by uid


def read_left_state(directory: Path, *, after: int = 0) -> LeftState | None:
    """Return the last state that a run has written to its ledger; None if there is none.

    Args:
        directory: of the ledger.
        after: number of the segment before the run's first one: what is up to there is of the run that it resumes.
    Raises: LedgerError.
    """
    if last_number(directory) <= after:
        return None
    if (last := _last_state(directory)) is None:
        return None
    names, groups = set(last.fields["groups"]), dict[str, Record]()
    for record in read_ledger(directory):
        if record.kind in (FINISHED, NAMED) and record.fields["uid"] in names:
            groups[record.fields["uid"]] = record
    if missing := names - groups.keys():
        raise LedgerError(f"{directory}: {min(missing)} is not in it, as it had reached --ledger-max-gb")
    return LeftState(values=json.loads(last.body), groups=groups)


def unread_events(directory: Path, step: int) -> list[dict[str, Any]]:
    """Return what a driver records of a run up to a checkpoint's step, and had not read when all processes ended.

    The events of the last state in a ledger, in their order; none without a ledger. Raises: LedgerError.
    """
    if (last := _last_state(directory)) is None:
        return []
    try:
        parts = dict(json.loads(last.body)["dict"])
        run, log = (
            from_json(parts[name], References(prompt_of=_unused, group_of=_unused)) for name in ("run", "events")
        )
        unsent = [{"event": "step", **record} for _, record in sorted(run["unwritten"].items())]
        unread = [*log["_events"], *unsent]
        return [event for event in unread if event["event"] in STEP_OF and event[STEP_OF[event["event"]]] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"{directory}: the coordinator's state cannot be read: {error!r}") from error


def _last_state(directory: Path) -> Record | None:
    last = None
    for record in read_ledger(directory):
        last = record if record.kind == STATE else last
    return last


def _unused(uid: str) -> Any:
    raise ValueError(f"{uid} is no number")


def forget_done(state: RunState, work: WorkList, decided: Decided) -> None:
    """Let go of items that all ranks have fetched, and of the groups of their steps; under the coordinator's lock."""
    used = {*work.indices, decided.assembled}
    decided.notes = {index: note for index, note in decided.notes.items() if index in used}
    steps = {note.step for note in decided.notes.values() if isinstance(note, TrainNote)}
    state.flow.plans.keep(steps | state.stats.kept()["dropped"].keys() | state.flow.used_plan)


def describe(
    state: RunState, scheduler: Scheduler, work: WorkList, decided: Decided
) -> tuple[Any, dict[str, RolloutGroup]]:
    """Return the state as JSON, and the groups that it names, by uid; under the coordinator's lock."""
    forget_done(state, work, decided)
    groups: dict[str, RolloutGroup] = {}
    values = {
        **{name: kept(part) for name, part in _parts(state, scheduler, work).items()},
        "leases": state.leases.kept("train"),
        "stats": state.stats.kept(),
        "notes": decided.notes,
        "assembled": decided.assembled,
    }
    return to_json(values, groups), groups


def restore_state(
    left: LeftState, state: RunState, scheduler: Scheduler, work: WorkList, prompt_of: Callable[[str], Prompt]
) -> Decided:
    """Restore what `describe` has described; items of work that are not made yet are made. Raises: LedgerError."""

    @cache
    def group_of(uid: str) -> RolloutGroup:
        record = left.groups[uid]
        return group_from_bytes(record.body, lease_id=record.fields["lease"], prompt_of=prompt_of)

    def replay(step: int) -> ClosedStep:
        return state.flow.plans.replay(step)[0].close()

    try:
        values = from_json(left.values, References(prompt_of=prompt_of, group_of=group_of))
        for name, part in _parts(state, scheduler, work).items():
            restore(part, values[name])
        state.leases.restore(values["leases"], state.members.ids)
        state.flow.reopen_step()
        state.stats.restore(values["stats"], replay)
        decided = Decided(notes=values["notes"], assembled=values["assembled"])
    except (ValueError, KeyError, TypeError) as error:
        raise LedgerError(f"the coordinator's state cannot be read: {error!r}") from error
    state.evaluation.begin_again()
    state.absent.update(state.members.ids)
    for index, note in sorted(decided.notes.items()):
        assembly = scheduler.remake(note)
        work.add(index, assembly.make())
        if index == decided.assembled:
            assembly.then()
    decided.assembled = None
    return decided


def _parts(state: RunState, scheduler: Scheduler, work: WorkList) -> dict[str, Any]:
    return {
        "run": state,
        "queue": state.queue,
        "flow": state.flow,
        "plans": state.flow.plans,
        "updates": state.flow.updates,
        "members": state.members,
        "turns": state.turns,
        "mismatch": state.mismatch_monitor,
        "syncs": state.syncs,
        "counts": state.stats.counts,
        "records": state.stats.records,
        "checkpoints": state.checkpoint_schedule,
        "events": state.events,
        "evaluation": state.evaluation,
        "scheduler": scheduler,
        "work": work,
    }
