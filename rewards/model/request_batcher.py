"""Collect concurrent requests, and score what has arrived together.

One thread runs `run`. Consumes: requests. Waits for: the first request. Is unblocked by: a request, `close`. Produces:
judgements. While a batch is scored, further requests gather for the next one, so that no request waits for a timer.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from coati_rl.observability.phases import PHASES
from coati_rl.text import shorten
from rewards.model.judgement import JudgedConversation, Judgement

logger = logging.getLogger(__name__)

MAX_CONVERSATIONS = 256  # that are scored before requests are answered, unless one request has more
_Request = tuple[Sequence[JudgedConversation], "Future[list[Judgement]]"]


class _Model(Protocol):
    def score(self, conversations: Sequence[JudgedConversation]) -> list[Judgement]: ...


class RequestBatcher:
    """Implement `ModelClient` with a model of this process, which `load` makes."""

    def __init__(self, load: Callable[[], _Model]) -> None:
        self._load = load
        self._model: _Model | None = None
        self._condition = threading.Condition()  # guards the next two
        self._requests: deque[_Request] = deque()
        self._is_closed = False

    def load(self) -> None:
        """Load the model, unless it is loaded."""
        if self._model is None:
            self._model = self._load()

    def submit(self, conversations: Sequence[JudgedConversation]) -> "Future[list[Judgement]]":
        future: Future[list[Judgement]] = Future()
        future.set_running_or_notify_cancel()  # it cannot be cancelled
        with self._condition:
            if not self._is_closed:
                self._requests.append((conversations, future))
                self._condition.notify()
                return future
        future.set_result([_closed()] * len(conversations))
        return future

    def run(self) -> None:
        """Score requests until `close`."""
        while taken := self._take():
            conversations = [conversation for request, _ in taken for conversation in request]
            with PHASES.phase("score responses"):
                judgements = self._judge(conversations)
            for request, future in taken:
                future.set_result(judgements[: len(request)])
                judgements = judgements[len(request) :]

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            waiting = [*self._requests]
            self._requests.clear()
            self._condition.notify()
        for request, future in waiting:
            future.set_result([_closed()] * len(request))

    def _take(self) -> list[_Request]:
        """Wait for requests and return them, at least one; none when it is closed."""
        with self._condition:
            self._condition.wait_for(lambda: self._requests or self._is_closed)
            taken: list[_Request] = []
            size = 0
            while self._requests and (not taken or size + len(self._requests[0][0]) <= MAX_CONVERSATIONS):
                taken.append(self._requests.popleft())
                size += len(taken[-1][0])
            return taken

    def _judge(self, conversations: Sequence[JudgedConversation]) -> list[Judgement]:
        try:
            self.load()
            assert self._model is not None  # noqa: S101 - `load` made it
            return self._model.score(conversations)
        except Exception as error:  # a failed batch is invalid samples, and counted
            logger.exception("%d responses could not be scored", len(conversations))
            return [Judgement(problem=f"{type(error).__name__}: {shorten(error, 200)}")] * len(conversations)


def _closed() -> Judgement:
    return Judgement(problem="it was stopped before")


class LocalModel(RequestBatcher):
    """Run a batcher in a thread of this process."""

    def __init__(self, load: Callable[[], _Model]) -> None:
        super().__init__(load)
        self._thread = threading.Thread(target=self.run, name="reward-model", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """See `ModelClient.close`; waits for the batch that is being scored."""
        super().close()
        self._thread.join()
