"""Count the time in which this process ran: a stop (Ctrl-Z, SIGSTOP, a suspended machine) counts for nothing.

Whoever watches others for silence measures it with this clock, or it would blame them for its own absence.
"""

import threading
import time
from collections.abc import Callable

MAX_GAP_S = 2.0  # what a gap between two readings counts at most; the clock has to be read more often than that


class RunningClock:
    """Seconds since it was made or restarted, without those in which nobody read it for long; from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """`now`: a monotonic clock, in seconds."""
        self._now = now
        self._lock = threading.Lock()
        self._last = now()
        self._seconds = 0.0

    def read(self) -> float:
        """The time so far, in seconds."""
        with self._lock:
            now = self._now()
            self._seconds += min(now - self._last, MAX_GAP_S)
            self._last = now
            return self._seconds

    def restart(self) -> None:
        """Count from now on."""
        with self._lock:
            self._last, self._seconds = self._now(), 0.0
