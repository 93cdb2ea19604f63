"""Score the responses of several tasks, each with its task's reward.

A reward has processes of its own, as its limits are a process's: CPU time and memory for math, time on the clock for
what waits. So a function of one task that dies, hangs or leaks takes nothing from another task's.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coati_rl.errors import RunError
from coati_rl.protocols import GroupScorer
from coati_rl.types import DEFAULT_TASK, Problem

Factory = Callable[[], GroupScorer]


class TaskScorer:
    """Implement `GroupScorer`: give each group to the scorer of its task.

    Args:
        factories: make the scorers, by task; tasks with the same factory share a scorer. That of the task "default",
            which a run with named tasks may have no rows of, is made with its first group, the others at once.
    """

    def __init__(self, factories: Mapping[str, Factory]) -> None:
        self._factories = dict(factories)
        self._lock = threading.Lock()  # guards the next two
        self._is_closed = False
        self._scorers: dict[int, GroupScorer] = {}  # by the identity of their factory
        try:
            for task in factories:
                if task != DEFAULT_TASK:
                    self._scorer_of(task)
        except BaseException:
            self.close()
            raise

    def submit(self, responses: Sequence[str], problem: Problem) -> Any:
        """As `GroupScorer.submit`."""
        return self._scorer_of(problem.task).submit(responses, problem)

    def close(self) -> None:
        """As `GroupScorer.close`."""
        with self._lock:
            self._is_closed = True
            scorers = [*self._scorers.values()]
        for scorer in scorers:
            scorer.close()

    def _scorer_of(self, task: str) -> GroupScorer:
        factory = self._factories[task]
        with self._lock:
            if id(factory) not in self._scorers:
                if self._is_closed:
                    raise RunError("the scorer is closed")
                self._scorers[id(factory)] = factory()
            return self._scorers[id(factory)]
