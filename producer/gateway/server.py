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

from coati_rl.processes.http_server import listen, server_config, url_of

Result = TypeVar("Result")

_CLOSE_TIMEOUT_S = 10.0


class ServerThread:
    """Serve until `close`; the socket accepts connections when this returns.

    Args:
        app: answers.
        listener: a listening socket; None: one on loopback, at a free port.
        options: of uvicorn, in place of ours, such as a certificate.
    """

    def __init__(self, app: FastAPI, listener: socket.socket | None = None, **options: Any) -> None:
        self._listener = listener or listen()
        self.url = url_of(self._listener)
        self._loop = asyncio.new_event_loop()
        self._server = uvicorn.Server(server_config(app, **options))
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
