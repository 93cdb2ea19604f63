"""Decide when a pending weight commit may be executed, and fail it after its deadline.

In: the version, whether requests may be running during the swap, and a deadline. Out: its future, which is resolved
once: done, failed, or cancelled by the caller, which is possible until the swap has begun.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from coati_rl.errors import EngineError

_MAX_NAMED = 5  # episodes named in an error message


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCommit:
    """Hold one call of `GenerationEngine.commit_weights`."""

    policy_version: int
    in_flight: bool  # swap between two steps; False: when nothing is running and no episode is open
    deadline: float  # of time.monotonic()
    future: Future[tuple[str, ...]]  # identities of the weights

    def is_due(self, num_running: int, open_episodes: Sequence[str]) -> bool:
        """Return True if the weights may be swapped now; an open episode may have no running request (tool call)."""
        return self.in_flight or (num_running == 0 and not open_episodes)

    def check_deadline(self, num_running: int, open_episodes: Sequence[str]) -> None:
        """Raise EngineError if the deadline has passed."""
        if time.monotonic() >= self.deadline:
            raise EngineError(
                f"version {self.policy_version} was not committed: {num_running} requests were still running"
                f"{_named(open_episodes)} at the deadline; the old weights stay in use"
            )

    def begin(self) -> bool:
        """Mark the commit as begun. Returns: False if the caller has cancelled it; after True it cannot."""
        return self.future.set_running_or_notify_cancel()


def _named(episodes: Sequence[str]) -> str:
    if not episodes:
        return ""
    names = ", ".join(repr(episode) for episode in episodes[:_MAX_NAMED])
    more = f" and {len(episodes) - _MAX_NAMED} more" if len(episodes) > _MAX_NAMED else ""
    return f" and {len(episodes)} episodes were still open ({names}{more})"
