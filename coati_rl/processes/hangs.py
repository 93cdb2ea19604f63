"""Decide from the phases that actors report whether one of them hangs; `heartbeats` asks the actors.

Trainers work in lockstep: while one computes, the others wait for it in a collective, which does not show whom it waits
for. So trainers hang when all that are at the earliest item of work exceed their limits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from coati_rl.config.training import TrainingConfig
from coati_rl.config.update_rules import slow_seconds
from coati_rl.observability.phases import Phase

MEDIANS = 10  # limit of a phase, in multiples of its own median
FIRST = 10  # limit of the first phase of its kind, in multiples of --phase-timeout-s
_CALLS_S = 60.0  # of a producer to the coordinator, in one iteration of its loop
_WITH_DEADLINE = ("stage weights", "commit weights")  # --sync-timeout-s; the engine's part of it is a phase of its own
_WAIT = "wait for "  # prefix of the names of phases that wait for other actors


@dataclass(frozen=True, kw_only=True, slots=True)
class HangTimeouts:
    """Hold how long an actor may be silent, and how long a phase may last."""

    heartbeat_s: float
    phase_s: float
    floors: Mapping[str, float] = field(default_factory=dict)  # least limits, of phases with inner deadlines

    @staticmethod
    def of(config: TrainingConfig, *, checkpoint_bytes: int = 0) -> "HangTimeouts":
        """Return the config's limits.

        A phase that waits for calls with their own deadlines gets their time as well, one that writes a checkpoint the
        time that its bytes take.
        """
        cluster = config.cluster
        save_s = cluster.phase_timeout_s + slow_seconds(checkpoint_bytes)
        writing = ("save",) if config.run.kept_weights is None else ("save", "train", "repeat", "keep weights")
        sync_s = cluster.phase_timeout_s + config.setting("sync_timeout_s", 0.0)
        loop_s = cluster.phase_timeout_s + _CALLS_S
        return HangTimeouts(
            heartbeat_s=cluster.heartbeat_timeout_s,
            phase_s=cluster.phase_timeout_s,
            floors={"sync": sync_s, "rollout loop": loop_s, **dict.fromkeys(writing, save_s)},
        )

    def limit_s(self, phase: Phase) -> float | None:
        """Return the limit of a phase; None for those that wait for other actors, or have their own deadlines."""
        if phase.name.startswith(_WAIT) or phase.name in _WITH_DEADLINE:
            return None
        floor = max(self.phase_s, self.floors.get(phase.name, 0.0))
        return max(floor, FIRST * self.phase_s if phase.median_s is None else MEDIANS * phase.median_s)


def overdue(phases: Sequence[Phase], timeouts: HangTimeouts) -> Phase | None:
    """Return the innermost phase that exceeds its limit."""
    late = [p for p in phases if (limit := timeouts.limit_s(p)) is not None and p.seconds > limit]
    return late[-1] if late else None


def judge_producer(phases: Sequence[Phase], timeouts: HangTimeouts) -> str | None:
    """Return why a producer hangs, None if it works."""
    late = overdue(phases, timeouts)
    return None if late is None else _late(late, timeouts)


def judge_trainers(phases_of: Mapping[str, Sequence[Phase]], timeouts: HangTimeouts) -> str | None:
    """Return which trainer hangs, in which phase, and who waits for it; None while one may still be computing.

    Args:
        phases_of: of each trainer, by name.
        timeouts: the limits.
    """
    items = {name: [phase for phase in phases if phase.item is not None] for name, phases in phases_of.items()}
    if not items or not all(items.values()):
        return None  # one is between two items
    earliest = min(phases[0].item or 0 for phases in items.values())
    late: dict[str, Phase] = {}
    for name, phases in items.items():
        if phases[0].item == earliest:
            if (phase := overdue(phases, timeouts)) is None:
                return None
            late[name] = phase
    culprit = min(late, key=lambda name: (late[name].is_in_collective, -late[name].seconds))
    others = [f"{name} ({phases[-1].path})" for name, phases in items.items() if name != culprit]
    waiting = f"; {', '.join(others)} and the run wait for it" if others else "; the run waits for it"
    return f"{culprit} hangs: {_late(late[culprit], timeouts)}{waiting}"


def describe_phases(phases: Sequence[Phase]) -> str:
    """Return what an actor was doing, for messages: each thread's innermost phase."""
    paths = [phase.path for phase in phases]
    inner = [path for path in paths if not any(other.startswith(f"{path} > ") for other in paths)]
    return ", ".join(dict.fromkeys(inner)) or "no phase"


def _late(phase: Phase, timeouts: HangTimeouts) -> str:
    limit = timeouts.limit_s(phase)
    where = f", at {phase.where}" if phase.where else ""
    usual = "the first one" if phase.median_s is None else f"its median is {phase.median_s:.3g} s"
    return f"'{phase.path}' is not done after {phase.seconds:.0f} s{where} (limit {limit:g} s, {usual})"
