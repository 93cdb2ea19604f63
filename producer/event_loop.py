"""Run an event loop that other threads wake through a queue, without giving the interpreter's lock away.

An engine's step may finish several prompts. asyncio's own wake-up is a system call, at which the waiting thread goes on
after the first of them; the prompt that follows it would be sampled in another batch, and the last bits of its
log-probabilities, and so of the weights, would depend on time. With a queue the engine's thread goes on until it waits.
"""

import asyncio
import queue
import selectors
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from typing import TypeVarTuple

Args = TypeVarTuple("Args")

_POLL_S = 0.02  # for the queue, while the loop waits for sockets too


class _QueueSelector(selectors.DefaultSelector):
    """Wait for the queue; for sockets too where there are some beside the loop's own, which nothing is written to."""

    def __init__(self, wakes: "queue.SimpleQueue[None]") -> None:
        super().__init__()
        self._wakes = wakes

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector`; may return nothing before the time is over, as it may there."""
        has_sockets = len(self.get_map()) > 1
        wait_s = _POLL_S if timeout is None else min(timeout, _POLL_S)
        is_awake = self._take_wakes(0.0 if has_sockets else timeout)
        return super().select(0.0 if is_awake else wait_s) if has_sockets else []

    def _take_wakes(self, timeout: float | None) -> bool:
        """Wait for a wake-up, and take all that are there. Returns: there was one."""
        with suppress(queue.Empty):
            self._wakes.get(block=timeout is None or timeout > 0, timeout=timeout)
            with suppress(queue.Empty):
                while True:
                    self._wakes.get_nowait()
            return True
        return False


class QueueEventLoop(asyncio.SelectorEventLoop):
    """Run as asyncio's event loop does, woken by `call_soon_threadsafe` through a queue."""

    def __init__(self) -> None:
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()
        super().__init__(_QueueSelector(self._wakes))

    def call_soon_threadsafe(
        self, callback: Callable[[*Args], object], *args: *Args, context: Context | None = None
    ) -> asyncio.Handle:
        """See `asyncio.AbstractEventLoop`. Raises: RuntimeError if the loop is closed."""
        # Appends to a deque, which any thread may do; in debug mode it would refuse to.
        soon = super().call_soon_threadsafe if self.get_debug() else self.call_soon
        handle = soon(callback, *args, context=context)
        self._wakes.put(None)
        return handle

    def call_from_anywhere(self, callback: Callable[..., object]) -> None:
        """Call soon, from any thread; nothing happens if the loop is closed."""
        with suppress(RuntimeError):
            self.call_soon_threadsafe(callback)
