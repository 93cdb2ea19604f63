"""Bound all waits of a transfer by one deadline, so that many short waits cannot add up to a long one.

Built from a duration and optionally a cancelling event; gives the time left, or raises an error naming the operation.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import TypeVar

from coati_rl.errors import TransferError, TransferTimeoutError

Result = TypeVar("Result")

Watch = Callable[[], str | None]  # why the transfer cannot succeed; None while it can

_POLL_S = 0.05  # longest uninterrupted wait: how late a cancellation or a dead peer may be noticed


class Deadline:
    """Hold the time by which a transfer has to end."""

    def __init__(self, timeout_s: float, *, cancelled: threading.Event | None = None) -> None:
        """Start the clock; another thread may set `cancelled` to end every wait with a TransferError."""
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._cancelled = cancelled
        self._watch: Watch | None = None

    def watching(self, watch: Watch) -> "Deadline":
        """Return the same deadline whose `check` also raises a TransferError as soon as `watch` returns a reason."""
        other = Deadline(self.timeout_s, cancelled=self._cancelled)
        other._end, other._watch = self._end, watch
        return other

    def remaining_s(self) -> float:
        """Return the seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def check(self, what: str) -> None:
        """Raise if the time is over or the transfer cannot succeed; `what` names rank, phase and bucket."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise TransferError(f"{what}: cancelled")
        reason = None if self._watch is None else self._watch()
        if reason is not None:
            raise TransferError(f"{what}: {reason}")
        if self.remaining_s() == 0.0:
            raise TransferTimeoutError(f"{what}: not done within {self.timeout_s:g} s")

    def slice_s(self) -> float:
        """Return how long one wait may block before `check` is due again; positive."""
        return max(0.001, min(_POLL_S, self.remaining_s()))

    def run(
        self, function: Callable[[], Result], *, what: str, discard: Callable[[Result], None] | None = None
    ) -> Result:
        """Run a library call that cannot be interrupted, and stop waiting for it at the deadline.

        An abandoned call continues in a daemon thread: a stopped peer can block a socket read for ever. Its late
        result is passed to `discard`.
        """
        future: Future[Result] = Future()

        def body() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001  (re-raised in the waiting thread)
                future.set_exception(error)

        threading.Thread(target=body, name="transfer-call", daemon=True).start()
        while True:
            try:
                return future.result(timeout=self.slice_s())
            except FutureTimeoutError:
                if future.done():  # the call itself raised a TimeoutError
                    return future.result()
                try:
                    self.check(what)
                except TransferError:
                    if discard is not None:
                        future.add_done_callback(lambda late: late.exception() or discard(late.result()))
                    raise
