"""Split a submitted group into tasks, and collect their scores."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from coati_rl.types import Problem, Score


class ResponseGroup:
    """Hold the responses of one `submit` and their scores; used by the pool's thread only.

    Args:
        responses: to be scored.
        problem: ground truth and prompt.
        chunk_size: tasks that one worker gets at a time.
    """

    def __init__(self, responses: Sequence[str], problem: Problem, *, chunk_size: int) -> None:
        self.responses = list(responses)
        self.chunk_size = chunk_size
        self.future: Future[list[Score]] = Future()
        self.future.set_running_or_notify_cancel()  # not cancellable: a worker may be scoring it
        self._problem = json.dumps({name: getattr(problem, name) for name in problem.__dataclass_fields__})
        self._scores: dict[int, Score] = {}

    def tasks(self, *, is_batch: bool) -> Iterator["ScoringTask"]:
        """Yield the tasks: one for a batch reward, else one per response."""
        size = len(self.responses) if is_batch else 1
        for start in range(0, len(self.responses), max(size, 1)):
            yield ScoringTask(group=self, start=start, stop=start + size)

    def request(self, start: int, stop: int) -> bytes:
        """Return the line that requests the scores of these responses from a worker."""
        return f"[{self._problem}, {json.dumps(self.responses[start:stop])}]\n".encode()

    def settle(self, start: int, scores: Sequence[Score]) -> bool:
        """Store the scores of the responses from `start` on. Returns: True if all scores are known."""
        self._scores.update(enumerate(scores, start))
        return len(self._scores) == len(self.responses)

    def all_scores(self) -> list[Score]:
        """Return the scores in the order of the responses."""
        return [self._scores[index] for index in range(len(self.responses))]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoringTask:
    """Hold responses start..stop of a group with a common time limit: one, or all for a batch reward."""

    group: ResponseGroup
    start: int
    stop: int
    num_deaths: int = 0  # processes that died while scoring it

    @property
    def size(self) -> int:
        """Return the number of responses."""
        return self.stop - self.start
