"""Score groups by several scorers at the same time, and combine their scores.

Used where rewards are computed in different places: a reward model in its own process, and others in scoring processes.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

from coati_rl.types import Problem, Score
from rewards.weighted import Combination

if TYPE_CHECKING:  # it imports torch
    from coati_rl.protocols import GroupScorer


class CombinedScorer:
    """Implement `GroupScorer` by combining the scores of other scorers, which it owns.

    Args:
        scorers: one of each reward, in order.
        combine: makes one score of a response's scores.
    """

    def __init__(self, scorers: Sequence["GroupScorer"], combine: Combination) -> None:
        self._scorers = [*scorers]
        self._combine = combine

    def submit(self, responses: Sequence[str], problem: Problem) -> "Future[list[Score]]":
        """See `GroupScorer.submit`; fails as the first scorer that fails."""
        combined: Future[list[Score]] = Future()
        combined.set_running_or_notify_cancel()
        futures = [scorer.submit(responses, problem) for scorer in self._scorers]
        lock, left = threading.Lock(), [len(futures)]

        def count_down(_: object) -> None:
            with lock:
                left[0] -= 1
                is_last = left[0] == 0
            if is_last:
                self._settle(combined, futures)

        for future in futures:
            future.add_done_callback(count_down)
        return combined

    def close(self) -> None:
        with ExitStack() as stack:
            for scorer in self._scorers:
                stack.enter_context(closing(scorer))

    def _settle(self, combined: "Future[list[Score]]", futures: Sequence["Future[list[Score]]"]) -> None:
        try:
            columns = [future.result() for future in futures]
            combined.set_result([self._combine(scores) for scores in zip(*columns, strict=True)])
        except Exception as error:  # noqa: BLE001 - the caller of `submit` gets it
            combined.set_exception(error)
