"""Read the spans of a run's timeline (docs/timeline.md): who was busy with what, and for how long."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from coati_rl.observability.trace_file import events_of

_NAMES = ("generate", "score", "wait for prompts", "wait for work", "train")  # that rules look at
_MAX_ACTORS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedSpan:
    """A span that has ended."""

    actor: str
    name: str
    begin_s: float
    end_s: float
    uid: str = ""  # of its prompt

    @property
    def seconds(self) -> float:
        """Return its length."""
        return self.end_s - self.begin_s


def read_spans(directory: Path) -> tuple[EndedSpan, ...]:
    """Return the spans of trainers and producers, of at most 64 actors; damaged lines are left out."""
    paths = sorted(directory.glob("*-*.jsonl"))[:_MAX_ACTORS]
    events = ((path.stem, event) for path in paths for event in events_of(path))
    return tuple(
        EndedSpan(
            actor=actor,
            name=event.name,
            begin_s=event.begin_ns / 1e9,
            end_s=event.end_ns / 1e9,
            uid=str(event.args.get("uid", "")),
        )
        for actor, event in events
        if event.phase == "X" and event.name in _NAMES and "unfinished" not in event.args
    )


def covered_s(spans: Iterable[EndedSpan]) -> float:
    """Return for how many seconds at least one of the spans was open."""
    total, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda each: each.begin_s):
        total += max(0.0, span.end_s - max(span.begin_s, until))
        until = max(until, span.end_s)
    return total
