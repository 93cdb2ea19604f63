"""Call a user's episodes without blocking the event loop, with a time limit for each call.

In: what makes an episode. Out: its observations and steps, checked, or an EpisodeFailure that says which call failed
and how. Sync methods run in a thread that the episode has for itself, so that a call that hangs delays no other; async
ones run in an event loop of their own, in one thread for all.
"""

import asyncio
import inspect
import logging
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, Protocol

from coati_rl.text import shorten
from producer.environments.episode import Action, Episode, EpisodeFailure, EpisodeTask, Step
from producer.environments.loop_thread import LoopThread, is_cancellation
from producer.environments.own_copies import own_action, own_task
from producer.environments.returned_steps import as_rewards, as_start, as_step

OPTIONAL = ("truncated", "close")  # methods of an episode

logger = logging.getLogger(__name__)


class EpisodeCalls(Protocol):
    """Call the methods of one episode, one after another."""

    async def reset(self, task: EpisodeTask) -> Step:
        """Make the episode and begin it. Returns: what the policy reads, and its sampling. Raises: EpisodeFailure."""

    async def step(self, action: Action) -> Step:
        """Take a step. Raises: EpisodeFailure."""

    async def truncated(self) -> Mapping[str, float]:
        """Return the rewards, by name, that are due as a limit has ended it. Raises: EpisodeFailure."""

    async def close(self) -> None:
        """End it, whatever it does; what its own `close` raises is logged."""

    def abandon(self) -> None:
        """End it in the background, as nobody waits for it any more."""


class EpisodeHost(Protocol):
    """Make episodes, and end what they have left behind."""

    def open(self) -> EpisodeCalls:
        """Return the calls of a new episode."""

    def close(self) -> None:
        """End what runs for episodes."""


class ThreadHost:
    """Run episodes in threads of this process, which share its state; a call that hangs keeps its thread.

    Args:
        make_episode: the user's class with its arguments.
        timeout_s: for each call.
        max_stuck: calls that may hang past their limit before no further episode begins.
        has_own_copies: episodes may change their tasks and conversations, which are copied for them.
    """

    def __init__(
        self,
        make_episode: Callable[[], Episode],
        *,
        timeout_s: float,
        max_stuck: int = 256,
        has_own_copies: bool = True,
    ) -> None:
        self._make_episode = make_episode
        self._timeout_s = timeout_s
        self._max_stuck = max_stuck
        self._has_own_copies = has_own_copies
        self._stuck: set[Future[Any]] = set()
        self._loop: LoopThread | None = None
        self._starting = threading.Lock()  # of the loop

    def open(self) -> "_ThreadCalls":
        """See `EpisodeHost.open`. Raises: EpisodeFailure if too many calls hang."""
        self._stuck = {call for call in self._stuck if not call.done()}
        if len(self._stuck) >= self._max_stuck:
            raise EpisodeFailure(
                f"{len(self._stuck)} calls of the environment hang; --env-isolation process would end them"
            )
        return _ThreadCalls(self._make_episode, self, has_own_copies=self._has_own_copies)

    def close(self) -> None:
        """See `EpisodeHost.close`; threads that hang end with this process."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.close()

    async def answer(self, name: str, call: "Future[Any]") -> Any:
        """Wait for a call up to the limit. Raises: EpisodeFailure."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call), self._timeout_s)
        except TimeoutError:
            if not call.done():
                self._stuck.add(call)
            raise EpisodeFailure(f"{name} took longer than {self._timeout_s:g} s (--env-timeout)") from None

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run a coroutine in the event loop of async episodes, from any thread."""
        with self._starting:
            if self._loop is None:
                self._loop = LoopThread()
            return self._loop.run(coroutine)


class _ThreadCalls:
    """Implement `EpisodeCalls` with a thread of the episode's own."""

    def __init__(self, make_episode: Callable[[], Episode], host: ThreadHost, *, has_own_copies: bool) -> None:
        self._make_episode = make_episode
        self._host = host
        self._has_own_copies = has_own_copies
        self._thread = _CallThread()
        self._made: Future[Episode] | None = None
        self._episode: Episode | None = None
        self._last: Future[Any] | None = None  # call

    async def reset(self, task: EpisodeTask) -> Step:
        name = "the constructor"
        self._made = self._thread.run(name, self._make_episode)
        self._episode = await self._answer(name, self._made)
        return as_start(await self._call("reset", own_task(task) if self._has_own_copies else task))

    async def step(self, action: Action) -> Step:
        return as_step(await self._call("step", own_action(action) if self._has_own_copies else action))

    async def truncated(self) -> Mapping[str, float]:
        return as_rewards(await self._call("truncated"))

    async def close(self) -> None:
        try:
            is_late = self._last is not None and not self._last.done()  # its limit is over, and `close` waits behind it
            if is_late or self._episode is None:
                self.abandon()
            else:
                await self._call("close")
        except EpisodeFailure as error:
            logger.warning("an episode was not closed: %s", error)
        finally:
            self._thread.end()

    def abandon(self) -> None:
        if inspect.iscoroutinefunction(getattr(self._episode, "close", None)):
            self._close_made()  # does not wait for a sync call that hangs
        elif self._made is not None:
            self._thread.run("close", self._close_made)  # behind the call that runs, which may be the constructor
        self._thread.end()

    def _close_made(self) -> None:
        """Begin to close the episode, if its constructor has made one."""
        if self._made is None or self._made.exception() is not None:
            return
        close = getattr(self._made.result(), "close", None)
        if inspect.iscoroutinefunction(close):
            self._host.run(_guarded("close", close()))
        elif close is not None:
            close()

    async def _call(self, name: str, *arguments: object) -> Any:
        method = getattr(self._episode, name, None)
        if method is None and name in OPTIONAL:
            return None
        if not callable(method):
            raise EpisodeFailure(f"{type(self._episode).__name__} has no method {name}")
        if inspect.iscoroutinefunction(method):  # calling it runs none of its code
            return await self._answer(name, self._host.run(_guarded(name, method(*arguments))))
        returned = await self._answer(name, self._thread.run(name, method, *arguments))
        if inspect.isawaitable(returned):
            returned = await self._answer(name, self._host.run(_guarded(name, returned)))
        return returned

    async def _answer(self, name: str, call: "Future[Any]") -> Any:
        self._last = call
        return await self._host.answer(name, call)


class _CallThread:
    """Run calls one after another in a thread, which begins with the first and does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, name: str, function: Callable[..., Any], *arguments: object) -> "Future[Any]":
        """Call a function soon. Returns: its future, which cannot be cancelled, with an EpisodeFailure if it raises."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="episode", daemon=True)
            self._thread.start()
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def call() -> None:
            try:
                returned = function(*arguments)
            except BaseException as error:  # noqa: BLE001 - a user's code may raise SystemExit
                future.set_exception(failure_of(name, error))
            else:
                future.set_result(returned)

        self._calls.put(call)
        return future

    def end(self) -> None:
        """End the thread after the calls before."""
        if self._thread is not None:
            self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


async def _guarded(name: str, awaitable: Awaitable[Any]) -> Any:
    """Await. Raises: EpisodeFailure for whatever it raises; a SystemExit would end the event loop."""
    try:
        return await awaitable
    except BaseException as error:
        if is_cancellation(error):
            raise
        raise failure_of(name, error) from error


def failure_of(name: str, error: BaseException) -> EpisodeFailure:
    """Return the failure of a call that raised; its traceback goes to the log."""
    if isinstance(error, EpisodeFailure):
        return error
    logger.warning("%s of an episode raised", name, exc_info=error)
    return EpisodeFailure(f"{name} raised {type(error).__name__}: {shorten(error, 200)}")
