"""What a process does -> <run-dir>/timeline/<actor>.jsonl, as it happens; `coati_rl.observability.trace_file` merges
the files of all actors into one trace. A span has a name, a begin, an end and arguments, and lies on a track, where
spans may nest but not overlap: that of its thread (`span`), or the first free row of its name (`start`).

A thread of its own writes every half second, so that a killed process loses what came after. A span that is open for
longer is announced, and the file's modification time says until when the process lived: what hung is seen.
Memory and disk are bounded: of a long run, the last MAX_FILE_BYTES to 2 * MAX_FILE_BYTES of each actor are kept.

Times are nanoseconds of the wall clock, which is read once: from then on, the monotonic clock counts. See
docs/timeline.md.
"""

import atexit
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from heapq import heappop, heappush
from pathlib import Path
from typing import IO, Any

logger = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.5
MAX_FILE_BYTES = 4 * 2**20  # then it becomes <actor>.old.jsonl, and the one before is gone
MAX_BUFFERED = 20_000  # events not yet written; more are dropped and counted

_STEADY_TO_WALL_NS = time.time_ns() - time.perf_counter_ns()


def now_ns() -> int:
    """Nanoseconds since the epoch, never going back within a process."""
    return _STEADY_TO_WALL_NS + time.perf_counter_ns()


class Span:
    """Something that is going on; it ends with the `with` block or `end`."""

    __slots__ = ("_row", "_timeline", "args", "begin_ns", "is_announced", "name", "track")

    def __init__(self, timeline: "Timeline", name: str, track: str, args: dict[str, Any], row: int = 0) -> None:
        self._timeline = timeline
        self._row = row  # 0: on the track of a thread
        self.name = name
        self.track = track
        self.args = args
        self.is_announced = False
        self.begin_ns = now_ns()

    def end(self, **args: Any) -> None:
        """It is over; `args`: what is known by now."""
        self._timeline._end(self, args)

    def __enter__(self) -> "Span":
        return self

    def __exit__(self, *_: object) -> None:
        self._timeline._end(self, None)


class Timeline:
    """The record of one actor; all methods may be called from any thread, and none fails or waits for the disk."""

    def __init__(self, directory: Path | None, actor: str = "", *, max_file_bytes: int = MAX_FILE_BYTES) -> None:
        """`directory`: None records nothing."""
        self._is_on = directory is not None
        self._max_file_bytes = max_file_bytes
        self._buffer: deque[tuple[Any, ...]] = deque()
        self._num_dropped = 0
        self._open: dict[int, Span] = {}  # by id
        self._free_rows: dict[str, list[int]] = {}  # name -> heap
        self._num_rows: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._local = threading.local()  # .track: of the thread
        self._num_threads = 0
        self._closing = threading.Event()
        self._file: IO[bytes] | None = None
        if directory is not None:
            self._path = directory / f"{actor}.jsonl"
            self._writer = threading.Thread(target=self._write, name="timeline", daemon=True)
            self._writer.start()
            atexit.register(self.close)

    def span(self, name: str, **args: Any) -> Span:
        """Something that this thread does, from now on; nests in what it does already."""
        return self._begin(Span(self, name, self._track_of_thread(), args))

    def start(self, name: str, **args: Any) -> Span:
        """Something that goes on from now on, beside others of its name, and may end in another thread."""
        with self._lock:
            if free := self._free_rows.get(name):
                row = heappop(free)
            else:
                self._num_rows[name] += 1
                row = self._num_rows[name]
        return self._begin(Span(self, name, f"{name} {row}", args, row))

    def instant(self, name: str, **args: Any) -> None:
        """Something that happens now, to the whole process."""
        now = now_ns()
        self._keep(("i", name, "main", now, now, args))

    def close(self) -> None:
        """Write what is left; later events are lost."""
        atexit.unregister(self.close)
        if self._is_on and not self._closing.is_set():
            self._closing.set()
            self._writer.join(timeout=5.0)
            self._is_on = False

    # ---- the threads that are recorded ----

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
        if span._row:
            with self._lock:
                heappush(self._free_rows.setdefault(span.name, []), span._row)
            span._row = 0
        # In this order: a span that is written may not be announced afterwards.
        if self._open.pop(id(span), None) is not None:
            self._keep(("X", span.name, span.track, span.begin_ns, now, {**span.args, **args} if args else span.args))

    def _keep(self, event: tuple[Any, ...]) -> None:
        if not self._is_on:
            return
        if len(self._buffer) < MAX_BUFFERED:
            self._buffer.append(event)
        else:
            self._num_dropped += 1

    # ---- the thread that writes ----

    def _write(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._start_file("process")
            while not self._closing.wait(FLUSH_INTERVAL_S):
                self._flush()
            self._flush()
        except (OSError, TypeError, ValueError) as error:  # of the disk, or of an argument that is not JSON
            self._is_on = False
            self._buffer.clear()
            logger.warning("%s: the timeline ends here: %s", self._path, error)
        finally:
            if self._file is not None:
                self._file.close()

    def _start_file(self, kind: str) -> None:
        self._file = self._path.open("ab", buffering=0)
        # The last line of a process that was killed may not be whole.
        self._file.write(b"\n" + _line((kind, "", "", now_ns(), now_ns(), {})))

    def _flush(self) -> None:
        assert self._file is not None  # noqa: S101 - opened by the caller
        lines = []
        for _ in range(len(self._buffer)):
            lines.append(_line(self._buffer.popleft()))
        if self._num_dropped:
            now, number, self._num_dropped = now_ns(), self._num_dropped, 0
            lines.append(_line(("i", "events dropped", "main", now, now, {"number": number})))
        long_ago = now_ns() - int(FLUSH_INTERVAL_S * 1e9)
        for span in list(self._open.values()):
            if not span.is_announced and span.begin_ns < long_ago:
                span.is_announced = True
                lines.append(_line(("B", span.name, span.track, span.begin_ns, span.begin_ns, span.args)))
        if lines:
            self._file.write(b"".join(lines))
        os.utime(self._file.fileno(), ns=(now_ns(), now_ns()))
        if self._file.tell() > self._max_file_bytes:
            self._file.close()
            self._path.replace(self._path.with_suffix(".old.jsonl"))
            self._start_file("continued")


NO_TIMELINE = Timeline(None)


def _line(event: tuple[Any, ...]) -> bytes:
    phase, name, track, begin_ns, end_ns, args = event
    record = {"ph": phase, "name": name, "track": track, "begin_ns": begin_ns, "end_ns": end_ns, "args": args}
    return (json.dumps(record, separators=(",", ":"), default=str) + "\n").encode()
