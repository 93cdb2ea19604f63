"""Run each of a user's episodes in a process of its own: the producer's side.

Each has its own global state, such as random seeds and the working directory; one that takes too long is killed, with
all that it has started. What crosses is JSON. `episode_process` describes the processes and their messages.
"""

import asyncio
import json
import logging
import socket
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from typing import Any

from coati_rl.processes import fork_server
from producer.environments.compatible.run_limits import RunLimits
from producer.environments.episode import Action, EpisodeFailure, EpisodeTask, Step
from producer.environments.episode_process import BEGUN, BODY, CLASS_VARIABLE
from producer.environments.loop_thread import LoopThread
from producer.environments.returned_steps import as_rewards, as_start, as_step

logger = logging.getLogger(__name__)

_START_TIMEOUT_S = 120.0  # to import the user's file; one that uses a core all the while has ten times as long
_END_S = 5.0  # for the server to kill the processes
_MAX_LINE_BYTES = 64 << 20  # of what a call returned


class ProcessHost:
    """Implement `EpisodeHost` with a process for each episode.

    Args:
        name: FILE.py:CLASS, with an absolute path.
        arguments: of the class, by name.
        timeout_s: for each call.
        limits: of the run, for agents of other systems.
    """

    def __init__(
        self, name: str, arguments: Mapping[str, Any], *, timeout_s: float, limits: RunLimits | None = None
    ) -> None:
        self._class = json.dumps([name, dict(arguments), limits and asdict(limits)])
        self.timeout_s = timeout_s
        self.loop = LoopThread()  # the server dies with its thread
        self._server: _Server | None = None
        self._starting = asyncio.Lock()
        self._is_closed = False

    def open(self) -> "_ProcessCalls":
        return _ProcessCalls(self)

    def close(self) -> None:
        """Kill all processes, and wait for their end; again: nothing."""
        if not self._is_closed:
            self._is_closed = True
            self.loop.run(self._close()).result(2 * _END_S)
            self.loop.close()

    async def server(self) -> "_Server":
        """Return the server, started if it is not running. Raises: EpisodeFailure."""
        async with self._starting:
            if self._server is not None and not self._server.is_alive:
                self._server.close()
                self._server = None
            if self._server is None:
                self._server = _Server(self._class)
                await self._server.wait_ready()
            return self._server

    async def _close(self) -> None:
        if self._server is not None:
            self._server.close()


class _Server:
    """Start and control the server of the processes; used in the loop's thread."""

    def __init__(self, class_and_arguments: str) -> None:
        self._process, self._control = fork_server.start(BODY, {CLASS_VARIABLE: class_and_arguments})
        self._numbers = count()

    @property
    def is_alive(self) -> bool:
        """Return whether it takes requests. A process that ends closes its socket before it can be waited for."""
        try:
            return bool(self._control.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return self._process.poll() is None
        except OSError:  # it ended with a request unread
            return False

    async def wait_ready(self) -> None:
        """Wait until the user's file is imported. Raises: EpisodeFailure."""
        try:
            received = await self.first_message(asyncio.get_running_loop().sock_recv(self._control, 1 << 16))
        except TimeoutError as error:
            self.close()
            raise EpisodeFailure(f"the file was not imported within {error}") from None
        message = json.loads(received) if received else {"error": "the process that imports the file has ended"}
        if "error" in message:
            self.close()
            raise EpisodeFailure(message["error"])

    async def first_message(self, message: Coroutine[None, None, bytes]) -> bytes:
        """Wait for what it or a process of it says when it has started. Raises: TimeoutError."""
        return await fork_server.first_message(self._process.pid, message, _START_TIMEOUT_S)

    async def start(self) -> tuple[int, asyncio.StreamReader, asyncio.StreamWriter]:
        """Start a process. Returns: its number, and the connection to it. Raises: OSError."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                while not self._send({"start": number}, [theirs.fileno()]):
                    await asyncio.sleep(0.01)  # its queue is full
            except OSError:
                ours.close()
                raise
        reader, writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE_BYTES)
        return number, reader, writer

    async def kill(self, number: int) -> None:
        """Kill a process and all that it has started."""
        with suppress(OSError):  # the server has ended, and its processes with it
            while not self._send({"kill": number}, []):
                await asyncio.sleep(0.01)

    def close(self) -> None:
        """Kill all processes and the server, and wait for their end."""
        self._control.close()
        fork_server.wait_for_end(self._process, _END_S)

    def _send(self, message: dict[str, int], descriptors: list[int]) -> bool:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], descriptors)
        except BlockingIOError:
            return False
        return True


_Process = tuple[_Server, int, asyncio.StreamReader, asyncio.StreamWriter]  # the number is the server's


class _ProcessCalls:
    """Implement `EpisodeCalls` with a process."""

    def __init__(self, host: ProcessHost) -> None:
        self._host = host
        self._process: _Process | None = None
        self._answers = True

    async def reset(self, task: EpisodeTask) -> Step:
        return as_start(Step(**await self._run("reset", asdict(task))))

    async def step(self, action: Action) -> Step:
        returned = await self._run("step", asdict(action))
        return as_step(Step(**returned))

    async def truncated(self) -> Mapping[str, float]:
        return as_rewards(await self._run("truncated", {}))

    async def close(self) -> None:
        try:
            if self._process is not None and self._answers:
                await self._run("close", {})
        except EpisodeFailure as error:
            logger.warning("an episode was not closed: %s", error)
        finally:
            self.abandon()

    def abandon(self) -> None:
        self._host.loop.run(self._end())

    async def _run(self, name: str, argument: dict[str, Any]) -> Any:
        return await asyncio.wrap_future(self._host.loop.run(self._call(name, argument)))

    async def _call(self, name: str, argument: dict[str, Any]) -> Any:
        """Call a method, in the loop's thread. Raises: EpisodeFailure."""
        if self._process is None:
            self._process = await self._start()
        _, _, reader, writer = self._process
        self._answers = False
        try:
            writer.write(json.dumps({"call": name, "argument": argument}).encode() + b"\n")
            line = await asyncio.wait_for(reader.readline(), self._host.timeout_s)
        except TimeoutError:
            raise EpisodeFailure(f"{name} took longer than {self._host.timeout_s:g} s (--env-timeout)") from None
        except ValueError:
            raise EpisodeFailure(f"{name} returned more than {_MAX_LINE_BYTES >> 20} MiB") from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise EpisodeFailure(f"its process ended during {name}")
        self._answers = True
        message = json.loads(line)
        if "failure" in message:
            raise EpisodeFailure(message["failure"])
        return message["returned"]

    async def _start(self) -> _Process:
        """Start a process and wait for it, once more if the server ends meanwhile. Raises: EpisodeFailure."""
        for _ in range(2):
            server = await self._host.server()
            with suppress(TimeoutError, OSError):
                number, reader, writer = await server.start()
                if await server.first_message(reader.readline()) == BEGUN:
                    return server, number, reader, writer
                writer.close()
                await server.kill(number)
        raise EpisodeFailure("its process did not start; the producer's log may have the cause")

    async def _end(self) -> None:
        if self._process is not None:
            server, number, _, writer = self._process
            self._process = None
            await server.kill(number)
            writer.close()
