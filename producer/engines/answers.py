"""Hold the futures that callers of an engine wait for, and resolve each of them once.

In: requests and calls from any thread, results from the engine's thread. Out: futures with a result, or with an
EngineError that says why the engine ended.
"""

import threading
from concurrent.futures import Future
from typing import Any, TypeVar

from coati_rl.errors import CoatiError, EngineError
from coati_rl.types import GenerationRequest, GenerationResult

Result = TypeVar("Result")


class Answers:
    """Hold the open futures of requests and calls, the episodes that requests may name, and the engine's failure.

    All methods are thread-safe. Futures are resolved outside of the lock, since their callbacks may call these methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: tuple[str, BaseException | None] | None = None
        self._calls: set[Future[Any]] = set()
        self._requests: dict[str, tuple[Future[GenerationResult], int]] = {}  # by id: the future, and samples wanted
        self._episodes: set[str] = set()

    def check_alive(self) -> None:
        """Raise EngineError if the engine has ended."""
        if self._failure is not None:
            message, cause = self._failure
            raise EngineError(message) from cause

    def num_sequences(self) -> int:
        """Count the samples of the requests whose future is open."""
        with self._lock:
            return sum(num_samples for _, num_samples in self._requests.values())

    def add_request(self, request: GenerationRequest) -> "Future[GenerationResult]":
        """Create the future of a request; it is marked as running, so that it cannot be cancelled.

        Raises: EngineError if the engine has ended, the id is in use, or the episode is not open.
        """
        future: Future[GenerationResult] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            self.check_alive()
            if request.request_id in self._requests:
                raise EngineError(f"a request with id {request.request_id!r} is running; use another id")
            if request.episode_id is not None and request.episode_id not in self._episodes:
                raise EngineError(f"request {request.request_id!r}: episode {request.episode_id!r} is not open")
            self._requests[request.request_id] = future, request.num_samples
        return future

    def resolve(self, result: GenerationResult) -> None:
        """Resolve a request's future, unless it is resolved."""
        with self._lock:
            future, _ = self._requests.pop(result.request_id, (None, 0))
        if future is not None:
            future.set_result(result)

    def add_call(self, future: "Future[Any]") -> None:
        """Add a call's future. Raises: EngineError if the engine has ended."""
        with self._lock:
            self.check_alive()
            self._calls.add(future)

    def discard_call(self, future: "Future[Any]") -> None:
        """Remove a call's future."""
        with self._lock:
            self._calls.discard(future)

    def open_episode(self, episode_id: str) -> None:
        """Let requests name this episode. Raises: EngineError if the engine has ended, or the id is in use."""
        with self._lock:
            self.check_alive()
            if episode_id in self._episodes:
                raise EngineError(f"an episode with id {episode_id!r} is open; use another id")
            self._episodes.add(episode_id)

    def close_episode(self, episode_id: str) -> None:
        """Let no further request name this episode."""
        with self._lock:
            self._episodes.discard(episode_id)

    def fail(self, message: str, cause: BaseException | None) -> None:
        """Resolve all open futures with an EngineError and refuse new ones; the first failure's message is kept."""
        with self._lock:
            if self._failure is None:
                self._failure = message, cause
            message, cause = self._failure
            requests, self._requests = [future for future, _ in self._requests.values()], {}
            calls, self._calls = self._calls, set()
        for future in (*requests, *calls):
            if not future.done():
                error = EngineError(message)
                error.__cause__ = cause
                refuse(future, error)


def answer(future: "Future[Result]", result: Result) -> None:
    """Resolve a call's future, unless the caller has cancelled it."""
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def refuse(future: "Future[Any]", error: CoatiError) -> None:
    """Resolve a future with an error, unless the caller has cancelled it."""
    if future.running() or future.set_running_or_notify_cancel():
        future.set_exception(error)
