"""Count the time in which this process ran, without stops (Ctrl-Z, SIGSTOP, a suspended machine).

A process that watches others for silence measures it with this clock; else its own stop would count as their silence.
"""

import threading
import time
from collections.abc import Callable

MAX_GAP_S = 2.0  # the most that the time between two readings counts; the clock has to be read more often


class RunningClock:
    """Count the seconds since it was created or restarted, without long gaps between readings; from any thread."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Take a monotonic clock, in seconds."""
        self._now = now
        self._lock = threading.Lock()
        self._last = now()
        self._seconds = 0.0

    def read(self) -> float:
        """Return the time so far, in seconds."""
        with self._lock:
            now = self._now()
            self._seconds += min(now - self._last, MAX_GAP_S)
            self._last = now
            return self._seconds

    def restart(self) -> None:
        """Count from zero again."""
        with self._lock:
            self._last, self._seconds = self._now(), 0.0
