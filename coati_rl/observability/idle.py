"""Measure the fraction of wall time in which processes are idle, from notes of when they become idle or busy."""

import time
from collections.abc import Callable


class IdleFraction:
    """Measure the idle fraction of members, each idle or busy since its last note. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: dict[int, tuple[bool, float]] = {}  # member -> is idle, and the time up to which it is counted
        self._idle_s = 0.0  # over all members, since the last `take`
        self._present_s = 0.0

    def note(self, member: int, *, is_idle: bool) -> None:
        """Set a member's state from now on; a new member is added."""
        self._count(member)
        self._state[member] = (is_idle, self._clock())

    def remove(self, member: int) -> None:
        """Remove a member; its time so far counts."""
        self._count(member)
        self._state.pop(member, None)

    def take(self) -> float | None:
        """Return the idle fraction, in [0, 1], of the members' time since the last call; None without members."""
        for member in list(self._state):
            self.note(member, is_idle=self._state[member][0])
        idle_s, present_s = self._idle_s, self._present_s
        self._idle_s = self._present_s = 0.0
        return idle_s / present_s if present_s else None

    def _count(self, member: int) -> None:
        if member in self._state:
            is_idle, since = self._state[member]
            seconds = self._clock() - since
            self._present_s += seconds
            self._idle_s += seconds if is_idle else 0.0


class ProducerIdleFraction:
    """Measure the idle fraction of producers; one without leased prompts is idle. Not thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_fraction = IdleFraction(clock)
        self._num_prompts: dict[int, int] = {}

    def join(self, producer_id: int) -> None:
        """Add a producer, which is idle."""
        self._num_prompts[producer_id] = 0
        self._idle_fraction.note(producer_id, is_idle=True)

    def leave(self, producer_id: int) -> None:
        """Remove a producer."""
        self._num_prompts.pop(producer_id, None)
        self._idle_fraction.remove(producer_id)

    def change(self, producer_id: int, num_prompts: int) -> None:
        """Change a producer's number of prompts by `num_prompts`; an unknown producer is ignored."""
        if producer_id in self._num_prompts:
            self._num_prompts[producer_id] += num_prompts
            self._idle_fraction.note(producer_id, is_idle=self._num_prompts[producer_id] <= 0)

    def take(self) -> float | None:
        """See `IdleFraction.take`."""
        return self._idle_fraction.take()
