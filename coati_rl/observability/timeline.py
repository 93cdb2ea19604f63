"""Record the spans and events of a process in <run-dir>/timeline/<actor>.jsonl as they happen.

`coati_rl.observability.trace_file` merges the files of all actors into one trace. A span has a name, a begin, an end
and arguments. It is on the track of its thread, where spans may nest but not overlap (`span`), or has a number and may
overlap any other (`start`).

A background thread writes every half second; a killed process loses only later events. A span that is open for longer
is announced, and the file's modification time is the time until which the process lived: a hanging span is visible.
Memory and disk are bounded: beyond MAX_BUFFERED and MAX_FILE_BYTES events are dropped, and the file holds their number.

Times are nanoseconds of the wall clock, which is read once; the monotonic clock measures from there. See
docs/timeline.md.
"""

import atexit
import itertools
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from coati_rl.disk import disk_problem
from coati_rl.observability.phases import PHASES
from coati_rl.observability.resource_use import ResourceUse

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.5
RESOURCE_INTERVAL_S = 5.0
MAX_FILE_BYTES = 16 * 2**20  # per actor: some 120,000 spans
MAX_BUFFERED = 20_000  # events not yet written

_STEADY_TO_WALL_NS = time.time_ns() - time.perf_counter_ns()


def now_ns() -> int:
    """Return nanoseconds since the epoch, which never decrease within a process."""
    return _STEADY_TO_WALL_NS + time.perf_counter_ns()


class Span:
    """Represent a timed span; it ends with the `with` block or `end`."""

    __slots__ = ("_timeline", "args", "begin_ns", "is_announced", "name", "number", "phase", "track")

    def __init__(self, timeline: "Timeline", name: str, track: str, args: dict[str, Any], number: int = 0) -> None:
        self._timeline = timeline
        self.name = name
        self.track = track  # of its thread, "" if it has a number
        self.number = number  # 0: on the track of its thread
        self.args = args
        self.is_announced = False
        self.phase: int | None = None  # in PHASES, if it has a deadline there
        self.begin_ns = now_ns()

    def end(self, **args: Any) -> None:
        """End the span; `args` are added to its arguments."""
        self._timeline._end(self, args)

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, *_: object) -> None:
        self._timeline._end(self, None)


class Timeline:
    """Record one actor; all methods may be called from any thread, and none fails or waits for the disk."""

    def __init__(
        self,
        directory: Path | None,
        actor: str = "",
        *,
        has_descendants: bool = True,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Start recording to `directory`; None records nothing.

        Args:
            directory: of the run's timelines.
            actor: name of the file.
            has_descendants: whether what the processes below this one take of the machine is counted as its own.
            max_file_bytes: from which on events are only counted.
        """
        self._is_on = directory is not None
        self.problem: str | None = None  # why recording has stopped
        self._has_descendants = has_descendants
        self._max_file_bytes = max_file_bytes
        self._max_buffered = MAX_BUFFERED  # 0 when the file is full
        self._buffer: deque[tuple[Any, ...]] = deque()
        self._num_dropped = 0
        self._open: dict[int, Span] = {}  # by id
        self._numbers = itertools.count(1)  # of spans
        self._lock = threading.Lock()
        self._local = threading.local()  # .track: of the thread
        self._num_threads = 0
        self._closing = threading.Event()
        self._file: IO[bytes] | None = None
        self._writer: threading.Thread | None = None
        if directory is not None:
            self._path = directory / f"{actor}.jsonl"
            self._writer = threading.Thread(target=self._write, name="timeline", daemon=True)
            self._writer.start()
            atexit.register(self.close)

    def span(self, name: str, **args: Any) -> Span:
        """Begin a span of this thread, nested in its open ones. It is a phase, too: one that takes too long ends the
        run, or its producer (`coati_rl.processes.hangs`).
        """
        span = Span(self, name, self._track_of_thread(), args)
        span.phase = PHASES.begin(name, item=args.get("item"), step=args.get("step"))
        return self._begin(span)

    def start(self, name: str, **args: Any) -> Span:
        """Begin a span that may overlap others of its name and may end in another thread."""
        return self._begin(Span(self, name, "", args, next(self._numbers)))

    def instant(self, name: str, **args: Any) -> None:
        """Record an event of the whole process at this time."""
        now = now_ns()
        self._buffer_event(("i", name, "main", 0, now, now, args))

    def close(self) -> None:
        """Write the remaining events; later ones are lost."""
        atexit.unregister(self.close)
        if self._writer is not None and not self._closing.is_set():
            self._closing.set()
            self._writer.join(timeout=5.0)  # also one that the disk has refused: it may be about to say so
        self._is_on = False

    # ---- called by the recorded threads ----

    def _track_of_thread(self) -> str:
        try:
            track: str = self._local.track
        except AttributeError:
            with self._lock:
                self._num_threads += 1
                track = "main" if self._num_threads == 1 else f"thread {self._num_threads}"
            self._local.track = track
        return track

    def _begin(self, span: Span) -> Span:
        if self._is_on:
            self._open[id(span)] = span
        return span

    def _end(self, span: Span, args: dict[str, Any] | None) -> None:
        now = now_ns()
        if span.phase is not None:
            PHASES.end(span.phase)
        # In this order: a span that is written may not be announced afterwards.
        if self._open.pop(id(span), None) is not None:
            all_args = {**span.args, **args} if args else span.args
            event = ("X", span.name, span.track, span.number, span.begin_ns, now, all_args)
            self._buffer_event(event, is_due=span.is_announced)

    def _buffer_event(self, event: tuple[Any, ...], *, is_due: bool = False) -> None:
        """Buffer an event; with `is_due`, as its begin is in the file already, even if the buffer is full."""
        if not self._is_on:
            return
        if is_due or len(self._buffer) < self._max_buffered:
            self._buffer.append(event)
        else:
            with self._lock:
                self._num_dropped += 1

    # ---- called by the writer thread ----

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
            # The last line of a killed process may be incomplete.
            self._file.write(b"\n" + _mark("process"))
            use, sampled_ns = ResourceUse(has_descendants=self._has_descendants), now_ns()
            while not self._closing.wait(FLUSH_INTERVAL_S):
                if now_ns() - sampled_ns >= RESOURCE_INTERVAL_S * 1e9:
                    sampled_ns = now_ns()
                    self._count(use.sample())
                self._flush(is_last=False)
            self._flush(is_last=True)
        except (OSError, TypeError, ValueError) as error:  # of the disk, or of an argument that is not JSON
            self._is_on = False
            self._buffer.clear()
            self.problem = disk_problem(self._path, error) if isinstance(error, OSError) else str(error)
            logger.info("the timeline ends here: %s", self.problem)
        finally:
            if self._file is not None:
                self._file.close()

    def _count(self, values: dict[str, float]) -> None:
        now = now_ns()
        for name, value in values.items():
            self._buffer_event(("C", name, "main", 0, now, now, {name: round(value, 3)}))

    def _flush(self, *, is_last: bool) -> None:
        assert self._file is not None  # noqa: S101 - opened by the caller
        lines = [_line(self._buffer.popleft()) for _ in range(len(self._buffer))]
        if self._max_buffered:
            lines += self._announcements()
        if self._num_dropped and (self._max_buffered or is_last):  # a full file holds it once
            with self._lock:
                number, self._num_dropped = self._num_dropped, 0
            lines.append(_mark("i", "events dropped", number=number))
        if lines:
            self._file.write(b"".join(lines))
        if self._max_buffered and self._file.tell() > self._max_file_bytes:
            self._max_buffered = 0
            self._file.write(_mark("i", "timeline full"))
            logger.warning("%s has %d bytes: from now on its events are only counted", self._path, self._file.tell())
        os.utime(self._file.fileno(), ns=(now_ns(), now_ns()))

    def _announcements(self) -> Iterator[bytes]:
        """Yield the lines that announce spans which have been open for long."""
        long_ago = now_ns() - int(FLUSH_INTERVAL_S * 1e9)
        for span in list(self._open.values()):
            if not span.is_announced and span.begin_ns < long_ago:
                span.is_announced = True
                yield _line(("B", span.name, span.track, span.number, span.begin_ns, span.begin_ns, span.args))


NO_TIMELINE = Timeline(None)


def _mark(phase: str, name: str = "", **args: Any) -> bytes:
    now = now_ns()
    return _line((phase, name, "main", 0, now, now, args))


def _line(event: tuple[Any, ...]) -> bytes:
    names = ("ph", "name", "track", "number", "begin_ns", "end_ns", "args")
    record = dict(zip(names, event, strict=True))
    return (json.dumps(record, separators=(",", ":"), default=str) + "\n").encode()
