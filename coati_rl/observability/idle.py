"""Measure the share of wall time in which someone is idle, by notes of when that begins and ends."""

import time
from collections.abc import Callable


class IdleFraction:
    """Members, each idle or busy from the time of its last note on. Not thread-safe: its owner has a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._state: dict[int, tuple[bool, float]] = {}  # member -> is idle, and since when that is not counted yet
        self._idle_s = 0.0  # over all members, since the last `take`
        self._present_s = 0.0

    def note(self, member: int, *, is_idle: bool) -> None:
        """Note what is true of a member from now on; a new one joins."""
        self._count(member)
        self._state[member] = (is_idle, self._clock())

    def remove(self, member: int) -> None:
        """A member is gone; what it was counts."""
        self._count(member)
        self._state.pop(member, None)

    def take(self) -> float | None:
        """The share, from 0 to 1, of the members' time since the last call; None if there was no member."""
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
    """Producers by the number of prompts that each has in hand; one without is idle. Not thread-safe, as above."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = IdleFraction(clock)
        self._num_prompts: dict[int, int] = {}

    def join(self, producer_id: int) -> None:
        """A producer is there, and has nothing to do."""
        self._num_prompts[producer_id] = 0
        self._share.note(producer_id, is_idle=True)

    def leave(self, producer_id: int) -> None:
        """It is gone."""
        self._num_prompts.pop(producer_id, None)
        self._share.remove(producer_id)

    def change(self, producer_id: int, num_prompts: int) -> None:
        """It has so many prompts more, or less when negative; of a producer that is not there, nothing is noted."""
        if producer_id in self._num_prompts:
            self._num_prompts[producer_id] += num_prompts
            self._share.note(producer_id, is_idle=self._num_prompts[producer_id] <= 0)

    def take(self) -> float | None:
        """See `IdleFraction.take`."""
        return self._share.take()
