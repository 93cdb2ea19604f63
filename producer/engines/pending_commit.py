"""Say when a weight commit on its way through the engine thread is due, and when it is too late.

In: the version, whether it may meet running requests, and a deadline. Out: its future, which ends exactly once: done,
failed, or withdrawn by the caller, who may do so until the swap has begun.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from coati_rl.errors import EngineError

_MAX_NAMED = 5  # episodes named in an error message


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingCommit:
    """One call of `GenerationEngine.commit_weights`."""

    policy_version: int
    in_flight: bool  # between two steps; else as soon as nothing is running and no episode is open
    deadline: float  # of time.monotonic()
    future: Future[None]

    def is_due(self, num_running: int, open_episodes: Sequence[str]) -> bool:
        """True if the weights may be swapped now; an open episode may wait for a tool, so that nothing is running."""
        return self.in_flight or (num_running == 0 and not open_episodes)

    def check_deadline(self, num_running: int, open_episodes: Sequence[str]) -> None:
        """Raise EngineError if it is too late."""
        if time.monotonic() >= self.deadline:
            raise EngineError(
                f"version {self.policy_version} was not committed: {num_running} requests were still running"
                f"{_named(open_episodes)} at the deadline; the old weights go on serving"
            )

    def begin(self) -> bool:
        """False if the caller has withdrawn it; after True, he cannot."""
        return self.future.set_running_or_notify_cancel()


def _named(episodes: Sequence[str]) -> str:
    if not episodes:
        return ""
    names = ", ".join(repr(episode) for episode in episodes[:_MAX_NAMED])
    more = f" and {len(episodes) - _MAX_NAMED} more" if len(episodes) > _MAX_NAMED else ""
    return f" and {len(episodes)} episodes were still open ({names}{more})"
