"""Write records in a background thread, in order, so that no caller waits for the disk.

Consumes: jobs. Waits for: the next job. Produces: files, by its jobs. The first error of a job is kept as `problem`,
which ends the run; later jobs are dropped.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable

from coati_rl.errors import RunError

logger = logging.getLogger(__name__)

_IDLE_S = 10.0  # after which a writer without jobs has no thread, so that none is left of one that is no longer used


class BackgroundWriter:
    """Run jobs one after another; all methods may be called from any thread."""

    def __init__(self, on_change: Callable[[], None] = lambda: None, *, name: str = "writer") -> None:
        """Take a callback, which is called in the writer's thread after each job, and the thread's name."""
        self._on_change, self._name = on_change, name
        self._changed = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._num_unfinished = 0  # jobs, including the running one
        self._thread: threading.Thread | None = None
        self.problem: str | None = None  # why a job failed, the first one

    @property
    def is_idle(self) -> bool:
        """Return True when all submitted jobs are done."""
        return self._num_unfinished == 0

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job without waiting for it."""
        with self._changed:
            self._jobs.append(job)
            self._num_unfinished += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_for_room(self, *, max_unfinished: int, timeout_s: float) -> None:
        """Wait until at most `max_unfinished` jobs are left: a caller must not submit faster than the disk writes."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_unfinished <= max_unfinished, timeout_s)

    def flush(self, *, timeout_s: float) -> None:
        """Wait until all submitted jobs are done. Raises: RunError if one failed, or they are not done in time."""
        with self._changed:
            is_done = self._changed.wait_for(lambda: self.is_idle, timeout_s)
        if self.problem is not None:
            raise RunError(self.problem)
        if not is_done:
            raise RunError(f"rollouts and evaluations are not written after {timeout_s:g} s; check their disk")

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: bool(self._jobs), _IDLE_S):
                    self._thread = None  # the next job starts another one
                    return
                job = self._jobs.popleft()
            try:
                if self.problem is None:
                    job()
            except RunError as error:
                self.problem = str(error)
            except Exception as error:  # an unreported end of this thread would block the run for ever
                logger.exception("a record could not be written")
                self.problem = f"a record could not be written: {type(error).__name__}: {error}"
            with self._changed:
                self._num_unfinished -= 1
                self._changed.notify_all()
            self._on_change()
