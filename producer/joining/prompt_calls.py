"""Refuse a producer's calls about prompts that it made before it last said which prompts it holds.

A request whose connection breaks goes on here: a `lease` that still waits would take prompts that nobody has, after the
`rejoin` that could have given them back. So each call carries the number of rejoins so far, and a rejoin waits for
earlier calls that are being answered. Other calls wait for nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from coati_rl.errors import CoordinatorReplacedError


class PromptCalls:
    """Order the calls about prompts of one producer; used by the threads that answer them."""

    def __init__(self, *, wait_s: float) -> None:
        """Have a rejoin wait at most `wait_s` for earlier calls."""
        self._wait_s = wait_s
        self._changed = Condition()
        self._num_rejoins = 0  # the highest number that has come
        self._num_running = 0

    @contextmanager
    def call(self, num_rejoins: int) -> Iterator[None]:
        """Answer a call in the block. Raises: CoordinatorReplacedError if the producer has rejoined since."""
        with self._changed:
            if num_rejoins < self._num_rejoins:
                raise CoordinatorReplacedError("the producer has said since which prompts it holds")
            self._num_running += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_running -= 1
                self._changed.notify_all()

    def begin_rejoin(self, number: int) -> None:
        """Refuse what was called before the rejoin of this number, which is itself a `call` after that.

        Raises: CoordinatorReplacedError if earlier calls last: it has to be made again, with the next number.
        """
        with self._changed:
            self._num_rejoins = max(self._num_rejoins, number)
            if not self._changed.wait_for(lambda: not self._num_running, self._wait_s):
                raise CoordinatorReplacedError("an earlier request about prompts is still being answered")
