"""A weight commit on its way through the engine thread: when it is due, and when it is too late.

In: the version, whether it may meet running requests, and a deadline. Out: its future, which ends exactly once: done,
failed, or withdrawn by the caller, who may do so until the swap has begun.
"""

import time
from concurrent.futures import Future
from dataclasses import dataclass

from coati_rl.errors import EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCommit:
    """One call of `GenerationEngine.commit_weights`."""

    policy_version: int
    in_flight: bool  # between two steps; else as soon as nothing is running
    deadline: float  # of time.monotonic()
    future: Future[None]

    def is_due(self, num_running: int) -> bool:
        """True if the weights may be swapped now."""
        return self.in_flight or num_running == 0

    def check_deadline(self, num_running: int) -> None:
        """Raise EngineError if it is too late."""
        if time.monotonic() >= self.deadline:
            raise EngineError(
                f"version {self.policy_version} was not committed: {num_running} requests were still running "
                "at the deadline; the old weights go on serving"
            )

    def begin(self) -> bool:
        """False if the caller has withdrawn it; after True, he cannot."""
        return self.future.set_running_or_notify_cancel()
