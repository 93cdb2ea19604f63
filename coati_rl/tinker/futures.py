"""Let clients wait for answers: a future is done once, and is forgotten some time after it was retrieved."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from coati_rl.tinker.api_error import ApiError
from coati_rl.tinker.state import Reply


@dataclass(kw_only=True, slots=True)
class Future:
    """Hold who waits for an answer."""

    owner: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    accepted: asyncio.Event = field(default_factory=asyncio.Event)  # when its request is in the journal
    reply: Reply | None = None
    retrieved: float | None = None  # time of the last retrieval, of a monotonic clock
    start: Callable[[], None] | None = None  # of work that begins when the answer is asked for
    cancel: Callable[[], object] | None = None


class Futures:
    """Hold the futures of all requests by id."""

    def __init__(self, *, max_in_flight: int) -> None:
        self._futures: dict[str, Future] = {}
        self._max_in_flight = max_in_flight
        self._in_flight: Counter[str] = Counter()  # by owner

    def add(self, name: str, owner: str, *, is_limited: bool = True) -> Future:
        """Add a future. Raises: ApiError of status 429 if too many of the owner's are not answered."""
        if is_limited and self._in_flight[owner] >= self._max_in_flight:
            raise ApiError(429, f"{self._max_in_flight} requests of this key are not answered yet; wait for some")
        self._in_flight[owner] += 1
        self._futures[name] = Future(owner=owner)
        return self._futures[name]

    def get(self, name: str) -> Future | None:
        """Return a future."""
        return self._futures.get(name)

    def finish(self, name: str, reply: Reply) -> None:
        """Give a future its answer, unless it has one."""
        future = self._futures.get(name)
        if future is not None and future.reply is None:
            future.reply, future.start, future.cancel = reply, None, None
            self._in_flight[future.owner] -= 1
            future.done.set()

    def discard(self, name: str) -> None:
        """Forget a future; who waits for it gets an error."""
        self.finish(name, failure("the request ended with its session"))
        self._futures.pop(name, None)

    async def wait(self, name: str, owner: str, timeout_s: float) -> Reply | None:
        """Wait for an answer. Returns: None if the time is over. Raises: ApiError of status 404."""
        future = self._futures.get(name)
        if future is None or future.owner != owner:
            raise ApiError(
                404,
                f"no request {name[:200]!r}: its session has ended, its answer was retrieved some time ago, or it is "
                "another key's",
            )
        if future.start is not None:
            future.start()
            future.start = None
        try:
            await asyncio.wait_for(future.done.wait(), timeout_s)
        except TimeoutError:
            return None
        future.retrieved = time.monotonic()
        return future.reply

    def retrieved_before(self, moment: float) -> list[str]:
        """Return the futures that were last retrieved before a moment of the monotonic clock."""
        return [name for name, each in self._futures.items() if each.retrieved is not None and each.retrieved < moment]


def failure(message: str, category: str = "user") -> Reply:
    """Return the answer of a request that failed."""
    text = message.encode("utf-8", "replace").decode()[:2000]
    return json_reply({"error": text, "category": category}, is_error=True)


def json_reply(answer: Any, *, is_error: bool = False) -> Reply:
    """Return an answer in JSON."""
    return Reply(body=json.dumps(answer).encode(), is_error=is_error)
