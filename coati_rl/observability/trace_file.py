"""Merge <run-dir>/timeline/<actor>.jsonl of all actors into <run-dir>/timeline.json.

The output has Chrome's Trace Event Format, which ui.perfetto.dev and chrome://tracing open. An actor is a process of
the trace, each of its tracks a thread; a span with a number is a pair of asynchronous events, which the viewer draws
below each other where they overlap.

Rules of the format: times are microseconds, in any order; complete events ("X") of a thread nest or are apart, the
outer one first; asynchronous ones ("b", "e") are paired by category and id; pid and tid are small, and not 0. Source:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from coati_rl.disk import disk_errors

_ROLES = ("driver", "trainer", "producer", "coordinator")  # from top to bottom
_PHASES = ("X", "i", "B", "C", "process")


@contextmanager
def merged_at_exit(run_dir: Path) -> Iterator[None]:
    """Write the trace when the block ends, also by an exception.

    Raises: RunError if the file cannot be written and the block raised no error.
    """
    try:
        yield
    except BaseException:
        with suppress(OSError):
            write_trace(run_dir)
        raise
    with disk_errors(run_dir / "timeline.json"):
        write_trace(run_dir)


def write_trace(run_dir: Path) -> Path | None:
    """Merge what the actors have written so far. Returns: the trace's path, None if there is nothing to merge.

    Incomplete lines are left out. Raises: OSError if a file cannot be read or written.
    """
    actors = sorted((path.stem for path in (run_dir / "timeline").glob("*.jsonl")), key=actor_order)
    if not actors:
        return None
    path, partial = run_dir / "timeline.json", run_dir / ".timeline.json.partial"
    try:
        _write(partial, actors, run_dir / "timeline")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # of a disk that is full
    return path


def _write(path: Path, actors: Sequence[str], directory: Path) -> None:
    tids, ids = itertools.count(len(actors) + 1), itertools.count(1)  # a tid that is a pid would be the "main" thread
    with path.open("w", encoding="utf-8") as file:
        separator = '{"displayTimeUnit":"ms","traceEvents":[\n'
        for pid, actor in enumerate(actors, start=1):
            for record in _records(pid, actor, list(events_of(directory / f"{actor}.jsonl")), tids, ids):
                file.write(separator + json.dumps(record, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")


class Event(NamedTuple):
    """Hold a line of a timeline."""

    phase: str
    name: str
    track: str
    number: int  # not 0: it is on no track
    begin_ns: int
    end_ns: int
    args: dict[str, Any]


def events_of(path: Path) -> Iterator[Event]:
    """Yield an actor's spans, instants and counters.

    A span that was announced and never ended lasts until its process ended.
    """
    announced: dict[tuple[str, int, str, int], Event] = {}
    lived_until_ns = 0
    for event in _lines_of(path):
        key = (event.track, event.number, event.name, event.begin_ns)
        if event.phase == "process":  # another process of the same name: the run was resumed
            yield from _cut_off(announced, lived_until_ns)
            announced.clear()
        elif event.phase == "B":
            announced[key] = event
        else:
            announced.pop(key, None)
            yield event
        lived_until_ns = max(lived_until_ns, event.end_ns)
    last_sign_ns = path.stat().st_mtime_ns if announced else 0
    yield from _cut_off(announced, max(lived_until_ns, last_sign_ns))


def _lines_of(path: Path) -> Iterator[Event]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line, parse_constant=str)  # NaN is not JSON
                event = Event(
                    phase=record["ph"],
                    name=str(record["name"]),
                    track=str(record["track"]),
                    number=int(record["number"]),
                    begin_ns=int(record["begin_ns"]),
                    end_ns=int(record["end_ns"]),
                    args=dict(record["args"]),
                )
            except (ValueError, KeyError, TypeError):
                continue
            if event.phase in _PHASES and 0 <= event.begin_ns <= event.end_ns:
                yield event


def _cut_off(announced: dict[tuple[str, int, str, int], Event], end_ns: int) -> Iterator[Event]:
    for event in announced.values():
        end_ns = max(end_ns, event.begin_ns)
        yield event._replace(phase="X", end_ns=end_ns, args={**event.args, "unfinished": True})


def _records(
    pid: int, actor: str, events: list[Event], tids: Iterator[int], ids: Iterator[int]
) -> Iterator[dict[str, Any]]:
    """Yield the trace records of an actor: names, then events by time, enclosing spans before nested ones."""
    tracks = {"main"} | {event.track for event in events if not event.number}
    tid_of = {track: next(tids) for track in sorted(tracks, key=_by_number)}
    yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": actor}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for track, tid in tid_of.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
        yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
    for event in sorted(events, key=lambda event: (event.begin_ns, -event.end_ns)):
        # Whole microseconds, rounded down: nesting is kept, and they are exact as a double until the year 2255.
        begin_us, end_us = event.begin_ns // 1000, event.end_ns // 1000
        record = {"name": event.name, "pid": pid, "tid": tid_of["main" if event.number else event.track]}
        begin = {"ts": begin_us, "args": event.args}
        if event.number:
            pair = {"cat": event.name, "id": hex(next(ids))}
            yield {"ph": "b"} | record | pair | begin
            yield {"ph": "e"} | record | pair | {"ts": end_us}
        elif event.phase == "X":
            yield {"ph": "X"} | record | begin | {"dur": end_us - begin_us}
        elif event.phase == "C":
            yield {"ph": "C"} | record | begin
        else:
            yield {"ph": "i", "s": "p"} | record | begin


def actor_order(actor: str) -> tuple[int, list[tuple[int, str]]]:
    """Return a key that sorts actors by role, then by number."""
    role = actor.split("-")[0]
    return _ROLES.index(role) if role in _ROLES else len(_ROLES), _by_number(actor)


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key for names with numbers: producer-2 before producer-10."""
    return [(int(word), "") if word.isdecimal() else (0, word) for word in re.findall(r"[0-9]+|[^0-9]+", name)]
