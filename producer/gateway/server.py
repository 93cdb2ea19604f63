"""Run an application on a loopback socket in a thread with an event loop of its own.

Consumes: HTTP requests. Waits for: requests, coroutines that other threads submit. Is unblocked by: `close`, which ends
calls in flight, then the thread.
"""

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

Result = TypeVar("Result")

_BACKLOG = 1024  # connections that wait to be accepted
_GRACE_S = 2  # for replies at the end
_CLOSE_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 75


def listen(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """Open a listening socket; port 0 picks a free one. Raises: OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


def url_of(listener: socket.socket) -> str:
    """Return the URL that a listening socket is reached at, without a path."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def server_config(app: FastAPI) -> uvicorn.Config:
    """Return uvicorn's settings: no signals, no logs of its own, no headers that a client could forge."""
    return uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_GRACE_S,
    )


class ServerThread:
    """Serve until `close`; the socket accepts connections when this returns."""

    def __init__(self, app: FastAPI) -> None:
        self._listener = listen()
        self.url = url_of(self._listener)
        self._loop = asyncio.new_event_loop()
        self._server = uvicorn.Server(server_config(app))
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        """Run a coroutine on the server's event loop, from another thread. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Call a function on the server's event loop, from another thread; not if that has ended."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function)

    def close(self) -> None:
        """End the server and what was submitted; blocks until the thread has ended."""
        self.call_soon(self._end)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._listener.close()
            self._loop.close()

    async def _serve(self) -> None:
        await self._server.serve([self._listener])
        work = asyncio.all_tasks() - {asyncio.current_task()}
        for task in work:
            task.cancel()
        if work:
            await asyncio.wait(work, timeout=_CLOSE_TIMEOUT_S / 2)

    def _end(self) -> None:
        self._server.should_exit = True
