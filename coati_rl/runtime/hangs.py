"""Judge from what the actors report whether one of them hangs. Arithmetic alone; they are asked in `heartbeats`.

Trainers work in lockstep: while one computes, the others wait for it in a collective, where nobody can tell from
outside who waits for whom. So they hang when all that are at the earliest item are over their limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coati_rl.config import Config
from coati_rl.observability.phases import Phase

MEDIANS = 10  # a phase may take so many times its own median
FIRST = 10  # the first of its kind may take so many times --phase-timeout-s
_CALLS_S = 60.0  # of a producer to the coordinator, in one turn of its loop
_WITH_DEADLINE = ("stage weights", "commit weights")  # --sync-timeout-s; the engine's part of it is a phase of its own
_WAIT = "wait for "  # begins the names of phases that end when others have done something


@dataclass(frozen=True, kw_only=True, slots=True)
class HangTimeouts:
    """Describe how long an actor may be silent, and a phase may last."""

    heartbeat_s: float
    phase_s: float
    floors: Mapping[str, float] = field(default_factory=dict)  # of phases with deadlines of their own inside

    @staticmethod
    def of(config: Config) -> "HangTimeouts":
        """The config's. A phase that waits for calls with deadlines of their own has as much more."""
        cluster = config.cluster
        sync_s, loop_s = cluster.phase_timeout_s + config.sync.sync_timeout_s, cluster.phase_timeout_s + _CALLS_S
        return HangTimeouts(
            heartbeat_s=cluster.heartbeat_timeout_s,
            phase_s=cluster.phase_timeout_s,
            floors={"sync": sync_s, "rollout loop": loop_s},
        )

    def limit_s(self, phase: Phase) -> float | None:
        """For a phase; None for those that wait for others, or have deadlines of their own."""
        if phase.name.startswith(_WAIT) or phase.name in _WITH_DEADLINE:
            return None
        floor = max(self.phase_s, self.floors.get(phase.name, 0.0))
        return max(floor, FIRST * self.phase_s if phase.median_s is None else MEDIANS * phase.median_s)


def overdue(phases: Sequence[Phase], patience: HangTimeouts) -> Phase | None:
    """The innermost phase that is over its limit."""
    late = [p for p in phases if (limit := patience.limit_s(p)) is not None and p.seconds > limit]
    return late[-1] if late else None


def judge_producer(phases: Sequence[Phase], patience: HangTimeouts) -> str | None:
    """Return what is wrong with a producer, None if it works."""
    late = overdue(phases, patience)
    return None if late is None else _late(late, patience)


def judge_trainers(phases_of: Mapping[str, Sequence[Phase]], patience: HangTimeouts) -> str | None:
    """Name which trainer hangs, in what, and who waits for it; None while one of them may still be computing.

    Args:
        phases_of: of each trainer, by name.
        patience: the limits.
    """
    items = {name: [phase for phase in phases if phase.item is not None] for name, phases in phases_of.items()}
    if not items or not all(items.values()):
        return None  # one is on its way to its next item
    earliest = min(phases[0].item or 0 for phases in items.values())
    late: dict[str, Phase] = {}
    for name, phases in items.items():
        if phases[0].item == earliest:
            if (phase := overdue(phases, patience)) is None:
                return None
            late[name] = phase
    culprit = min(late, key=lambda name: (late[name].is_in_collective, -late[name].seconds))
    others = [f"{name} ({phases[-1].path})" for name, phases in items.items() if name != culprit]
    waiting = f"; {', '.join(others)} and the run wait for it" if others else "; the run waits for it"
    return f"{culprit} hangs: {_late(late[culprit], patience)}{waiting}"


def doing(phases: Sequence[Phase]) -> str:
    """Return what an actor was doing, for messages: each thread's innermost phase."""
    paths = [phase.path for phase in phases]
    inner = [path for path in paths if not any(other.startswith(f"{path} > ") for other in paths)]
    return ", ".join(dict.fromkeys(inner)) or "no phase"


def _late(phase: Phase, patience: HangTimeouts) -> str:
    limit = patience.limit_s(phase)
    where = f", at {phase.where}" if phase.where else ""
    usual = "the first one" if phase.median_s is None else f"its median is {phase.median_s:.3g} s"
    return f"'{phase.path}' is not done after {phase.seconds:.0f} s{where} (limit {limit:g} s, {usual})"
