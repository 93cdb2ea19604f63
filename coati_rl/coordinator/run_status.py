"""Say in one line what a run is doing and what it waits for: at the terminal, in the log, in a stall's message."""

from dataclasses import dataclass

from coati_rl.coordinator.prompt_leasing import PromptLeasing
from coati_rl.coordinator.run_state import RunState
from coati_rl.text import name_producers
from coati_rl.work import Wait


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """Describe a run at a moment."""

    idle_s: float  # since a group, a step or a weight sync was finished
    text: str  # what trainers do and wait for, then why producers without a prompt get none


def run_status(state: RunState, leasing: PromptLeasing, wait: Wait | None) -> RunStatus:
    """Look at a run, under the coordinator's lock; `wait`: of the item that trainers ask for, if it is not decided."""
    parts = []
    if state.saves.being_written is not None:
        parts.append(f"the checkpoint of step {state.saves.being_written} is being written")
    if (step := state.stats.records.first_open) is not None:
        parts.append(f"step {step + 1} is being trained")
    if wait is not None:
        parts.append(wait.reason)
    if state.members.is_committing and not any(state.members.committing in part for part in parts):
        parts.append(f"waiting for {state.members.committing}")
    if (missing := state.members.missing) and not any(missing in part for part in parts):
        parts.append(missing)
    refused: dict[str, list[int]] = {}
    for producer in sorted(set(state.members.ids) - state.leases.holders()):
        if (reason := leasing.refusal(producer, is_drained=True)) is not None:
            refused.setdefault(reason, []).append(producer)
    parts += [f"{name_producers(ids)}: {reason}" for reason, ids in refused.items()]
    return RunStatus(idle_s=state.idle_s, text="; ".join(parts))
