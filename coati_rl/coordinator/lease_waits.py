"""Let producers wait for prompts, and wake those that may get one.

Hundreds may wait while the last groups of a rollout step come in: what concerns none of them, or one, wakes no more.
"""

import threading
from collections.abc import Callable, Iterable


class LeaseWaits:
    """Hold a condition per waiting producer, of the coordinator's lock; called under it."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiting: dict[int, threading.Condition] = {}

    def wait_for(self, producer_id: int, is_over: Callable[[], bool], timeout_s: float) -> None:
        """Wait until a producer's request can be answered, at most so long.

        A producer makes one at a time: an earlier one that still waits has lost its caller, and ends at its timeout.
        """
        here = self._waiting[producer_id] = threading.Condition(self._lock)
        here.wait_for(is_over, timeout_s)
        if self._waiting.get(producer_id) is here:
            del self._waiting[producer_id]

    def notify(self, producers: Iterable[int] | None = None) -> None:
        """Wake these producers; None: all."""
        for producer_id in [*self._waiting] if producers is None else producers:
            if (waiting := self._waiting.get(producer_id)) is not None:
                waiting.notify_all()
