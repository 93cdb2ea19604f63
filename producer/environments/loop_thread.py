"""Run coroutines in an event loop in a thread of its own, apart from the producer's.

A user's coroutine that blocks delays others of its kind, and neither the engine nor the rollout loop. One that leaves
with sys.exit does not end the loop.
"""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

_END_S = 5.0  # for what runs to end


class LoopThread:
    """Run an event loop in a thread; it does not keep the process alive."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="async episodes", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Begin a coroutine, from any thread. Returns: its future; to cancel it cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Cancel what runs, and stop the loop, unless a task blocks it."""
        with suppress(TimeoutError):
            self.run(_cancel_others()).result(_END_S)
        self._is_closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self) -> None:
        while not self._is_closing:
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt):  # of a user's task, which asyncio raises here too
                logger.warning("a task of an episode raised what would end the event loop", exc_info=True)


def is_cancellation(error: BaseException) -> bool:
    """Return True if the task that runs is being cancelled, and False for a CancelledError that its own code raised."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others, timeout=_END_S) if others else None
