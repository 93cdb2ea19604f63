"""Cut what was submitted into tasks, and put their scores together again."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from coati_rl.types import Problem, Score


class Group:
    """The responses of one `submit`; what is known of them belongs to the pool's thread.

    Args:
        chunk_size: tasks that one worker gets at a time.
    """

    def __init__(self, responses: Sequence[str], problem: Problem, *, chunk_size: int) -> None:
        self.responses = list(responses)
        self.chunk_size = chunk_size
        self.future: Future[list[Score]] = Future()
        self.future.set_running_or_notify_cancel()  # not cancellable: a worker may be in the middle of it
        self._problem = json.dumps({name: getattr(problem, name) for name in problem.__dataclass_fields__})
        self._scores: dict[int, Score] = {}

    def tasks(self, *, is_batch: bool) -> Iterator["Task"]:
        """All of it: one task for a batch reward, else one per response."""
        size = len(self.responses) if is_batch else 1
        for start in range(0, len(self.responses), max(size, 1)):
            yield Task(group=self, start=start, stop=start + size)

    def request(self, start: int, stop: int) -> bytes:
        """The line that asks a worker for the scores of these responses."""
        return f"[{self._problem}, {json.dumps(self.responses[start:stop])}]\n".encode()

    def settle(self, start: int, scores: Sequence[Score]) -> bool:
        """Note the scores of the responses from `start` on. Returns: all are known."""
        self._scores.update(enumerate(scores, start))
        return len(self._scores) == len(self.responses)

    def all_scores(self) -> list[Score]:
        """The scores in the order of the responses."""
        return [self._scores[index] for index in range(len(self.responses))]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """Responses start..stop of a group, which share a time limit and a failure: one, or all for a batch reward."""

    group: Group
    start: int
    stop: int
    num_deaths: int = 0  # processes that died over it

    @property
    def size(self) -> int:
        """Its number of responses."""
        return self.stop - self.start
