"""Hold an actor of Ray and the call that lasts as long as its work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray

from coati_rl.runtime import remote
from coati_rl.runtime.joined_handle import JoinedHandle
from coati_rl.runtime.placement_manager import Reservation


@dataclass(frozen=True, kw_only=True, slots=True)
class ManagedActor:
    """Implement `Member` with an actor of Ray."""

    name: str
    handle: Any
    task: Any  # reference of the call
    reservation: Reservation | None = None

    @property
    def is_joined(self) -> bool:
        """Return True for a producer that has joined over HTTPS, and has no process in Ray."""
        return isinstance(self.handle, JoinedHandle)

    def is_done(self) -> bool:
        return bool(ray.wait([self.task], timeout=0)[0])

    def result(self) -> Any:
        return remote.wait_for(self.task, who=self.name, timeout_s=1.0)


def num_done(tasks: Sequence[Any]) -> int:
    """Return how many remote calls have ended."""
    return len(ray.wait(list(tasks), num_returns=len(tasks), timeout=0)[0]) if tasks else 0
