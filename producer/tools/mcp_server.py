"""Offer the tools of an MCP server, a process that is spoken to over its standard streams.

A producer has one process for each --mcp-server, shared by all of its episodes, as a start takes seconds. One that dies
or hangs makes the samples invalid whose calls it owes an answer, and is started again for the next call. Its client
lives in an event loop of its own, in a thread: a start, and the check of a server that may hang, go on when the call
that began them is given up.
"""

import asyncio
import shlex
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.text import shorten
from producer.environments.episode import EpisodeFailure
from producer.tools.tool import Schema, Tool, ToolError

_START_S = 60.0  # some fetch their packages
_END_S = 10.0  # the package gives a server 2 s each after its input closes, and after SIGTERM
_PING_S = 3.0  # for a server that has not answered a call in time


class McpServer:
    """Implement `ToolKit` with the tools of a server, which is started here to list them.

    Args:
        command: with its arguments, as a shell splits them.
        timeout_s: for each call; below that of the caller, so that a server that hangs is found out here.
    Raises: ConfigError if the package mcp is missing, or the server cannot be started or lists no tools.
    """

    def __init__(self, command: str, *, timeout_s: float) -> None:
        try:
            import mcp  # noqa: F401 - an extra
        except ImportError as error:
            raise ConfigError(f"--mcp-server needs the package mcp: pip install 'coati-rl[mcp]' ({error})") from error
        self._command = command
        self._timeout_s = timeout_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._connection: _Connection | None = None  # that calls use
        self._connections: list[_Connection] = []  # whose server may not have ended
        self._starting: asyncio.Task[None] | None = None
        try:
            tools = self._run(self._list()).result(2 * _START_S)
        except Exception as error:  # whatever its start raises
            self.close()
            raise ConfigError(f"--mcp-server {_reason(error)}") from error
        if not tools:
            self.close()
            raise ConfigError(f"--mcp-server {command}: the server has no tools; leave it out")
        self._schemas = [_schema_of(tool) for tool in tools]

    @property
    def schemas(self) -> Sequence[Schema]:
        return self._schemas

    def open(self) -> Sequence[Tool]:
        return [_McpTool(schema, self.call) for schema in self._schemas]

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool of the server. Raises: ToolError for a result that is an error; EpisodeFailure."""
        return await asyncio.wrap_future(self._run(self._call(name, arguments)))

    def close(self) -> None:
        if self._loop.is_closed():
            return
        with suppress(Exception):  # a server that does not end is killed
            self._run(self._end_all()).result(2 * _END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _list(self) -> list[Any]:
        connection = await self._connected()
        tools: list[Any] = []
        cursor = None
        while True:
            page = await connection.client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, PARSE_ERROR, REQUEST_TIMEOUT

        connection = await self._connected()
        try:
            result = await connection.client.call_tool(name, arguments, read_timeout_seconds=self._timeout_s)
        except MCPError as error:
            is_of_connection = error.code in (CONNECTION_CLOSED, PARSE_ERROR, REQUEST_TIMEOUT)  # or a server's own use
            is_lost = is_of_connection and not await self._answers(connection)
            if is_lost or error.code == REQUEST_TIMEOUT:
                raise EpisodeFailure(f"{self._command}: {shorten(error.message, 200)}") from error
            raise ToolError(error.message) from error
        except Exception as error:  # of its pipes, or a result that is none
            self._give_up(connection)
            raise EpisodeFailure(f"{self._command}: {_reason(error)}") from error
        text = "\n".join(_text_of(part) for part in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    async def _connected(self) -> "_Connection":
        """Return the connection to a server that runs, which is started if need be. Raises: EpisodeFailure."""
        while True:
            if self._connection is None and self._starting is None:
                self._starting = asyncio.ensure_future(self._start())
            if self._starting is not None:
                await asyncio.shield(self._starting)
            connection = self._connection
            if connection is not None:
                if connection.check is None:
                    return connection
                await asyncio.shield(connection.check)

    async def _start(self) -> None:
        """Start a server when those before it have ended. Raises: EpisodeFailure."""
        try:
            await self._end_connections()
            connection = _Connection(self._command)
            self._connections.append(connection)
            try:
                await asyncio.wait_for(connection.open(), _START_S)
            except Exception as error:  # whatever its start raises
                await connection.close()
                raise EpisodeFailure(f"{self._command}: the server does not start: {_reason(error)}") from error
            self._connection = connection
        finally:
            self._starting = None

    async def _answers(self, connection: "_Connection") -> bool:
        """Return True if a server answers at all; one that does not is given up, also if the caller is."""
        if connection.check is None:
            connection.check = asyncio.ensure_future(self._check(connection))
        return await asyncio.shield(connection.check)

    async def _check(self, connection: "_Connection") -> bool:
        if not await connection.answers():
            self._give_up(connection)
            return False
        connection.check = None
        return True

    def _give_up(self, connection: "_Connection") -> None:
        """End a server; the next call starts another one."""
        connection.end()
        if self._connection is connection:
            self._connection = None

    async def _end_all(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
        await self._end_connections()

    async def _end_connections(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._connections))
        self._connections = [connection for connection in self._connections if not connection.has_ended]


class _Connection:
    """Hold one process of a server; its client is opened and closed in one task, as anyio wants it."""

    def __init__(self, command: str) -> None:
        self._command = command
        self._is_unwanted = asyncio.Event()
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None
        self.client: Any = None
        self.check: asyncio.Task[bool] | None = None  # whether it still answers

    async def open(self) -> None:
        """Start the server. Raises: whatever the package does."""
        self._task = asyncio.ensure_future(self._hold())
        await asyncio.shield(self._opened)

    async def answers(self) -> bool:
        """Return True if it answers at all."""
        try:
            await asyncio.wait_for(self.client.session.list_tools(), _PING_S)
        except Exception:  # noqa: BLE001 - it does not
            return False
        return True

    def end(self) -> None:
        """Have the server end, in the background; it is killed in the end."""
        if not self._is_unwanted.is_set():
            self._is_unwanted.set()
            if self._task is not None and not self._opened.done():
                self._task.cancel()  # once: again, it would cut the end of the server short

    @property
    def has_ended(self) -> bool:
        """Return True if nothing of the server is left."""
        return self._task is None or self._task.done()

    async def close(self) -> None:
        """End the server, and wait for its end."""
        self.end()
        if self._task is not None:
            await asyncio.wait({self._task}, timeout=_END_S)

    async def _hold(self) -> None:
        from mcp import Client, StdioServerParameters, stdio_client

        command, *arguments = shlex.split(self._command)
        parameters = StdioServerParameters(command=command, args=arguments)
        try:
            async with Client(stdio_client(parameters, errlog=sys.__stderr__ or sys.stderr)) as self.client:
                self._opened.set_result(None)
                await self._is_unwanted.wait()
        except Exception as error:  # noqa: BLE001 - whatever its start, or its end, raises
            if not self._opened.done():
                self._opened.set_exception(error)


class _McpTool:
    def __init__(self, schema: Schema, call: Callable[[str, dict[str, Any]], Coroutine[Any, Any, str]]) -> None:
        self.schema = schema
        self._call = call

    async def call(self, arguments: dict[str, Any]) -> str:
        return await self._call(self.schema["function"]["name"], arguments)

    async def close(self) -> None:
        pass


def _schema_of(tool: Any) -> Schema:
    described = {"name": tool.name, "description": tool.description or tool.name, "parameters": tool.input_schema}
    return {"type": "function", "function": described}


def _text_of(part: Any) -> str:
    return str(part.text) if part.type == "text" else f"({part.type}: only text is supported)"


def _reason(error: BaseException) -> str:
    """Return what an error says; of a group of them, which anyio raises, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return shorten(error, 200) or type(error).__name__
