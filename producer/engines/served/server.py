"""Hold the connection to one server: make its HTTP calls in an event loop of its own thread, and watch its health.

Each call has a deadline, is retried after connection errors until then, follows no redirect and reads a reply up to a
limit (`coati_rl.http_call`). Bodies are JSON.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from time import monotonic
from typing import Any

import httpx2

from coati_rl.http_call import CallRefusedError, HttpCallError, call, new_client
from coati_rl.text import shorten

LOST_AFTER_S = 20.0  # without an answer about its health a server is lost
_WATCH_S = 2.0  # between two questions
_NUM_COMPLETIONS = 1024  # at a time; further ones wait here
_NUM_OTHER_CALLS = 16  # beside them: health, weights and probes do not wait for completions
_REPLY_BYTES = 8 << 20  # of what is no completion
_GRACE_S = 5.0
_HEADERS = {"Content-Type": "application/json"}


class Server:
    """Call one server. All methods may be called from any thread."""

    def __init__(self, url: str) -> None:
        """Start the thread; nothing is sent. `url`: http://HOST:PORT, without a slash at its end."""
        self.url = url
        self._loop = asyncio.new_event_loop()
        self._clients: dict[int, httpx2.AsyncClient] = {}  # by how many connections they have at most; made in the loop
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-server", daemon=True)
        self._thread.start()
        self._tasks: set[Future[Any]] = set()

    def start(
        self, path: str, body: Any, *, timeout_s: float, max_reply_bytes: int, is_completion: bool
    ) -> "Future[dict[str, Any]]":
        """Post a JSON body without waiting. Returns: a future of the reply's object; it fails with HttpCallError."""
        content, num = json.dumps(body).encode(), _NUM_COMPLETIONS if is_completion else _NUM_OTHER_CALLS
        return self._submit(self._call("POST", path, content, timeout_s, max_reply_bytes, num_connections=num))

    def post(self, path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
        """Post a JSON body, or none, and wait. Returns: the reply's object, or {}. Raises: HttpCallError."""
        content = b"" if body is None else json.dumps(body).encode()
        return self._wait(self._submit(self._call("POST", path, content, timeout_s, _REPLY_BYTES)), timeout_s)

    def get(self, path: str, *, timeout_s: float) -> dict[str, Any]:
        """Get a path and wait. Returns: the reply's object, empty for an empty reply. Raises: HttpCallError."""
        return self._wait(self._submit(self._call("GET", path, None, timeout_s, _REPLY_BYTES)), timeout_s)

    def watch(self, path: str, on_lost: Callable[[str], None]) -> None:
        """Get a path every two seconds; call `on_lost` once, with why, when the server does not answer."""
        self._submit(self._watch(path, on_lost))

    def close(self) -> None:
        """End all calls, whose futures are cancelled, and the thread."""
        if self._loop.is_closed():
            return
        for task in list(self._tasks):
            task.cancel()
        asyncio.run_coroutine_threadsafe(self._end(), self._loop)
        self._thread.join(_GRACE_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end(self) -> None:
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait(others, timeout=_GRACE_S / 2) if others else None
        for client in self._clients.values():
            await client.aclose()
        self._loop.call_soon(self._loop.stop)

    def _submit(self, work: Coroutine[Any, Any, Any]) -> "Future[Any]":
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._tasks.add(future)
        future.add_done_callback(self._tasks.discard)
        return future

    def _wait(self, future: "Future[dict[str, Any]]", timeout_s: float) -> dict[str, Any]:
        try:
            return future.result(timeout_s + _GRACE_S)
        except TimeoutError:
            future.cancel()
            raise HttpCallError(f"no reply within {timeout_s:g} s") from None
        except CancelledError:
            raise HttpCallError("the server is lost, or no longer used") from None

    async def _call(
        self,
        method: str,
        path: str,
        content: bytes | None,
        timeout_s: float,
        max_reply_bytes: int,
        *,
        num_connections: int = _NUM_OTHER_CALLS,
    ) -> dict[str, Any]:
        if num_connections not in self._clients:
            self._clients[num_connections] = new_client(num_connections)
        reply = await call(
            self._clients[num_connections],
            method,
            f"{self.url}{path}",
            deadline=monotonic() + timeout_s,
            body=content,
            headers=_HEADERS,
            max_reply_bytes=max_reply_bytes,
        )
        return _object(reply, path)

    async def _watch(self, path: str, on_lost: Callable[[str], None]) -> None:
        while True:
            try:
                await self._call("GET", path, None, LOST_AFTER_S, _REPLY_BYTES)
            except Exception as error:  # noqa: BLE001  a server that nothing watches is not found lost
                on_lost(str(error) or repr(error))
                for waiting in list(self._tasks):  # a commit in this moment must not wait for it to the end
                    waiting.cancel()
                return
            await asyncio.sleep(_WATCH_S)


def _object(reply: bytes, path: str) -> dict[str, Any]:
    """Return a reply's JSON object, a list as {"items": list}. Raises: CallRefusedError for anything else."""
    try:
        value = json.loads(reply) if reply.strip() else {}
    except (ValueError, RecursionError) as error:
        raise CallRefusedError(f"{path} answered no JSON: {shorten(error, 120)}") from error
    if isinstance(value, list):
        return {"items": value}
    if not isinstance(value, dict):
        raise CallRefusedError(f"{path} answered no JSON object: {shorten(value, 120)}")
    return value
