"""Sum a run's timeline up: how long each actor was busy with what, and who was busy when at its end."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from coati_rl.observability.trace_file import Event, actor_order, events_of
from coati_rl.report.curves import rounded

_ACTORS_OF_A_ROLE = 4  # a file may have 16 MiB
_MAX_SPANS = 300  # of an actor that are drawn
_MAX_PARTS = 16  # of an actor
_JOINED_NS = 5_000_000  # spans of one name so near to each other are drawn as one
_NS = 1_000_000_000


@dataclass(kw_only=True, slots=True)
class _Part:
    """Sum the spans of one name; those that overlap count once."""

    inside: str  # the name of the span around the first one; empty: none
    busy_ns: int = 0
    number: int = 0
    until_ns: int = 0

    def add(self, event: Event) -> None:
        begin = max(event.begin_ns, self.until_ns)
        self.busy_ns += max(0, event.end_ns - begin)
        self.until_ns = max(self.until_ns, event.end_ns)
        self.number += 1


@dataclass(kw_only=True, slots=True)
class _Span:
    """Hold a time that is drawn."""

    name: str
    begin_ns: int
    end_ns: int


@dataclass(kw_only=True, slots=True)
class _Actor:
    """Collect the parts of one actor, and its last spans."""

    parts: dict[str, _Part] = field(default_factory=dict)
    last: "deque[_Span]" = field(default_factory=lambda: deque(maxlen=_MAX_SPANS))
    recent: dict[str, _Span] = field(default_factory=dict)
    begin_ns: int = 0
    end_ns: int = 0

    def add(self, event: Event, inside: str) -> None:
        self.begin_ns = self.begin_ns or event.begin_ns
        self.end_ns = max(self.end_ns, event.end_ns)
        self.parts.setdefault(event.name, _Part(inside=inside)).add(event)
        if not inside:
            self._draw(event)

    def ordered(self) -> list[tuple[str, _Part]]:
        """Return the parts, the longest first, and those inside another one behind it."""
        by_time = sorted(self.parts.items(), key=lambda part: -part[1].busy_ns)
        outer = [each for each in by_time if each[1].inside not in self.parts]
        return [each for one in outer for each in (one, *(part for part in by_time if part[1].inside == one[0]))]

    def _draw(self, event: Event) -> None:
        """Keep a span to be drawn; one that overlaps the last of its name, or begins at once behind it, extends it."""
        drawn = self.recent.get(event.name)
        if drawn is not None and event.begin_ns <= drawn.end_ns + _JOINED_NS:
            drawn.end_ns = max(drawn.end_ns, event.end_ns)
        else:
            self.recent[event.name] = span = _Span(name=event.name, begin_ns=event.begin_ns, end_ns=event.end_ns)
            self.last.append(span)


def time_parts(run_dir: Path) -> dict[str, Any]:
    """Return seconds by actor and part, and the last spans of each actor, as JSON; empty without timelines."""
    names = sorted((path.stem for path in (run_dir / "timeline").glob("*.jsonl")), key=actor_order)
    roles = groupby(names, key=lambda name: name.split("-")[0])
    shown = [name for _, members in roles for name in islice(members, _ACTORS_OF_A_ROLE)]
    read = {name: _read(events_of(run_dir / "timeline" / f"{name}.jsonl")) for name in shown}
    actors = {name: actor for name, actor in read.items() if actor.parts}
    if not actors:
        return {}
    end_ns = max(actor.end_ns for actor in actors.values())
    drawn = [actor.last[0].begin_ns for actor in actors.values() if len(actor.last) == _MAX_SPANS]
    begin_ns = max(drawn) if drawn else min(actor.begin_ns for actor in actors.values())
    return {
        "actors": [_described(name, actor, begin_ns, end_ns) for name, actor in actors.items()],
        "seconds": rounded((end_ns - begin_ns) / _NS),
        "left_out": len(names) - len(shown),
    }


def _read(events: Iterable[Event]) -> _Actor:
    """Take an actor's spans; one inside another of its track is a part of that one."""
    actor = _Actor()
    spans = (event for event in events if event.phase == "X")
    open_spans: dict[str, list[Event]] = {}  # by track, the outermost first
    for event in sorted(spans, key=lambda event: (event.begin_ns, -event.end_ns)):
        around = open_spans.setdefault(event.track, []) if not event.number else []
        while around and around[-1].end_ns <= event.begin_ns:
            around.pop()
        actor.add(event, around[0].name if around else "")
        around.append(event)
    return actor


def _described(name: str, actor: _Actor, begin_ns: int, end_ns: int) -> dict[str, Any]:
    lived = max(1, actor.end_ns - actor.begin_ns)
    drawn = {span.name for span in actor.last}
    names = [part for part, _ in actor.ordered() if part in drawn]
    spans = [
        [
            rounded((max(span.begin_ns, begin_ns) - begin_ns) / _NS),
            rounded((span.end_ns - begin_ns) / _NS),
            names.index(span.name),
        ]
        for span in actor.last
        if span.end_ns > begin_ns
    ]
    parts = [
        {"name": part, "seconds": rounded(it.busy_ns / _NS), "number": it.number, "is_inside": bool(it.inside)}
        for part, it in actor.ordered()[:_MAX_PARTS]
    ]
    return {"name": name, "seconds": rounded(lived / _NS), "parts": parts, "names": names, "spans": spans}
