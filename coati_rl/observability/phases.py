"""Record the current phase of each thread of this process, its duration so far, and durations of earlier ones.

A phase is a piece of work with an end, such as an optimizer step; phases nest. The driver requests `PHASES.report()`
each second and compares a phase with its own median: see `processes.hangs`. Only time in which this process ran
counts, as its clock is read with each report.
"""

import gc
import itertools
import statistics
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from coati_rl.observability.running_clock import RunningClock

_NUM_DURATIONS = 64  # per name
_LONG_S = 2.0  # a report names the executing line of a phase that lasts longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Describe an open phase."""

    name: str
    path: str  # of names, from the outermost phase of its thread to this one
    item: int | None  # of the trainers' work: the outermost phase's
    seconds: float  # so far
    median_s: float | None  # of those of its name that ended here; None for the first
    where: str = ""  # "loss.py:12 in loss": innermost line of its thread, outside installed packages if possible
    is_in_collective: bool = False  # its thread waits for other ranks


@dataclass(slots=True)
class _Open:
    name: str
    label: str  # for messages
    item: int | None
    thread: int
    begin: float  # of the running clock
    begin_s: float  # of the monotonic clock


class Phases:
    """Track the open phases of a process; all methods may be called from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Take a monotonic clock, in seconds."""
        self._now = now
        self._clock = RunningClock(now)
        self._numbers = itertools.count()
        self._open: dict[int, _Open] = {}
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_NUM_DURATIONS))

    def begin(self, name: str, *, item: int | None = None, step: int | None = None) -> int:
        """Begin a phase of this thread.

        Args:
            name: of the kind of phase; durations are compared by name.
            item: number of the item of work that it carries out as a whole, if it does.
            step: optimizer step, for messages.
        Returns: a number for `end`.
        """
        number = next(self._numbers)
        label = name if item is None or step is None else f"{name} (step {step})"
        self._open[number] = _Open(name, label, item, threading.get_ident(), self._clock.read(), self._now())
        return number

    def end(self, number: int) -> None:
        """End a phase."""
        if (phase := self._open.pop(number, None)) is not None:
            self._durations[phase.name].append(self._now() - phase.begin_s)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Open a phase for the time of a `with` block."""
        number = self.begin(name)
        try:
            yield
        finally:
            self.end(number)

    def report(self) -> tuple[Phase, ...]:
        """Return all open phases, each thread's from the outermost to the innermost."""
        now, frames = self._clock.read(), _current_frames()
        outer: dict[int, list[_Open]] = defaultdict(list)
        phases = []
        for phase in list(self._open.values()):
            stack = outer[phase.thread]
            stack.append(phase)
            seconds, frame = now - phase.begin, frames.get(phase.thread)
            durations = list(self._durations[phase.name])
            where, is_in_collective = _where(frame) if frame and seconds > _LONG_S else ("", False)
            phases.append(
                Phase(
                    name=phase.name,
                    path=" > ".join(entry.label for entry in stack),
                    item=stack[0].item,
                    seconds=seconds,
                    median_s=statistics.median(durations) if durations else None,
                    where=where,
                    is_in_collective=is_in_collective,
                )
            )
        return tuple(phases)


def _current_frames() -> dict[int, FrameType]:
    """Return the innermost frame of each thread.

    Without the garbage collector: before Python 3.12 a collection in the middle of the call, which holds the
    interpreter's lock of threads, may wait for that lock for ever (python/cpython issue 106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if was_enabled:
            gc.enable()


def _where(frame: FrameType) -> tuple[str, bool]:
    """Return the line that a thread executes, and whether it is in a collective of torch."""
    stack, inner = [], frame
    while inner.f_back is not None:
        stack.append(inner)
        inner = inner.f_back
    own = next((f for f in stack if _is_own(f.f_code.co_filename)), frame)
    file = own.f_code.co_filename.rpartition("/")[2]
    in_collective = any("/torch/distributed/" in f.f_code.co_filename for f in stack)
    return f"{file}:{own.f_lineno} in {own.f_code.co_name}", in_collective


def _is_own(path: str) -> bool:
    """Return False for installed packages and for Python's own library."""
    return not ("/site-packages/" in path or "/lib/python" in path or path.startswith("<"))


PHASES = Phases()  # of this process, which is one actor
