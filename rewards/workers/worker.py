"""Start and control workers, which are forks of a process that has made the reward and imported its libraries.

A pool has one such process, the fork server (`coati_rl/processes/fork_server.py`): a start of Python and the imports
take 0.7 s for math, a fork milliseconds. `rewards/workers/worker_process.py` describes what a worker is told and says.
"""

import asyncio
import json
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from math import inf
from time import monotonic
from typing import Any, cast

from coati_rl.processes import fork_server
from coati_rl.processes.fork_server import as_line, cpu_time_s
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Score
from rewards.workers.worker_process import BODY, SPEC_VARIABLE

START_TIMEOUT_S = 60.0  # imports take 0.7 s on an idle core; one that uses a core all the while has ten times as long
_END_TIMEOUT_S = 2.0  # to kill the workers and collect them
_CONTROL_BUFFER = 4 << 20  # bytes of requests that wait while the reward is made, if the system allows as many
# A worker is starved if it ran for less than this fraction of a time limit because other processes had the cores. Its
# limit is then extended, up to this multiple.
_MIN_RUN_FRACTION, _MAX_STRETCH = 0.2, 5
_MAX_CPU_STRETCH = 20  # a CPU-time limit ends after this multiple in wall-clock time, for a process that does not run


class StartError(Exception):
    """Report that no worker can be started, with the cause."""


class WorkerLostError(Exception):
    """Report that the worker has ended, or sent an invalid message."""


class Worker(asyncio.Protocol):
    """Exchange requests and scores with a worker process, on the pool's side.

    Args:
        number: identifies it to the fork server.
        on_end: called when the worker has ended.
    """

    def __init__(self, number: int, on_end: Callable[[], None]) -> None:
        self.number = number
        self.pid = 0  # until it is ready
        self.has_ended = False
        self._on_end = on_end
        self._transport: asyncio.Transport
        self._lines: deque[bytes] = deque()
        self._unread = b""  # an incomplete line
        self._arrival: asyncio.Future[None] | None = None  # awaited by `_line`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        self._lines.extend(lines)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.has_ended = True
        self._wake()
        self._on_end()

    def send(self, request: bytes) -> None:
        """Send a line without blocking; it is buffered until the worker reads."""
        self._transport.write(request)

    async def ready(self) -> dict[str, Any]:
        """Wait for the worker's first message and return it. Raises: WorkerLostError."""
        message: dict[str, Any] = json.loads(await self._line(inf))
        self.pid = message.get("ready", 0)
        return message

    async def scores(self, num_scores: int, timeout_s: float) -> list[Score]:
        """Wait for the next scores within a limit of wall-clock time.

        A worker that gets no core continues until it has run for a fifth of the limit, or until five times the limit
        has passed, so that an ordinary answer does not become invalid on a busy machine.

        Raises: TimeoutError; WorkerLostError.
        """
        started, limit_s = monotonic(), timeout_s
        before = self._core_times_s() if len(self._lines) < num_scores else (0.0, 0.0)
        scores: list[Score] = []
        while len(scores) < num_scores:
            try:
                scores.append(await self._score(started + limit_s))
            except TimeoutError:
                ran_s, waited_s = (now - then for now, then in zip(self._core_times_s(), before, strict=True))
                waits = waited_s > limit_s / 2 or self._waits_for_a_core()  # one that goes on is not counted yet
                is_starved = ran_s < _MIN_RUN_FRACTION * timeout_s and waits
                if not is_starved or limit_s >= _MAX_STRETCH * timeout_s:
                    raise
                limit_s += timeout_s / 10
        return scores

    async def score_in_cpu_time(self, cpu_limit_s: float) -> Score:
        """Wait for the next score within a limit of CPU time, for a worker that computes and never waits.

        A worker that does not use as much CPU time within twenty times the limit (for example, since it is stopped) is
        lost and not late: its response may be scored by another worker.

        Raises: TimeoutError; WorkerLostError.
        """
        started, before_s, ran_s = monotonic(), cpu_time_s(self.pid), 0.0
        while True:
            try:
                return await self._score(monotonic() + max(cpu_limit_s - ran_s, cpu_limit_s / 50))
            except TimeoutError:
                ran_s = cpu_time_s(self.pid) - before_s
                if ran_s >= cpu_limit_s:
                    raise
                if monotonic() - started >= _MAX_CPU_STRETCH * cpu_limit_s:
                    raise WorkerLostError("it did not run") from None

    def close(self) -> None:
        """Close the connection."""
        self._transport.abort()

    async def _score(self, until: float) -> Score:
        """Wait for the next score. Raises: TimeoutError; WorkerLostError."""
        try:
            return Score(**json.loads(await self._line(until)))
        except TimeoutError:
            if self._transport.get_write_buffer_size():  # it has not read the responses: it is stopped, for example
                raise WorkerLostError("it does not read its requests") from None
            raise
        except (TypeError, ValueError) as error:
            raise WorkerLostError(f"it sent an invalid score: {error}") from error

    async def _line(self, until: float) -> bytes:
        """Wait for the next line; one that arrived in time counts, even if this thread reads it late."""
        while not self._lines:
            if self.has_ended:
                raise WorkerLostError("it has ended")
            if until <= monotonic():
                raise TimeoutError
            loop = asyncio.get_running_loop()
            self._arrival = loop.create_future()
            timer = loop.call_at(until, self._wake) if until < inf else None
            try:
                await self._arrival
            finally:
                if timer is not None:
                    timer.cancel()
        return self._lines.popleft()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _core_times_s(self) -> tuple[float, float]:
        """Return how long its first thread has run and waited for a core, in seconds; 0 if the kernel does not say."""
        try:
            with open(f"/proc/{self.pid}/schedstat", "rb", buffering=0) as file:
                ran, waited, _ = file.read(100).split()
        except (OSError, ValueError):
            return 0.0, 0.0
        return int(ran) / 1e9, int(waited) / 1e9

    def _waits_for_a_core(self) -> bool:
        """Return whether its first thread would run if a core were free; False if the kernel does not say."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb", buffering=0) as file:
                return file.read(4096).rpartition(b")")[2].split()[0] == b"R"
        except (OSError, IndexError):
            return False


class ForkServer:
    """Run the process that workers are forked from; for use in an event loop.

    It dies with the *thread* that created it, to which PR_SET_PDEATHSIG refers. Therefore create it on a thread that
    lives as long as the pool. SIGINT stays blocked in it, and in the workers, if that thread blocks SIGINT.

    Raises: StartError if no further process can be started.
    """

    def __init__(self, spec: RewardSpec) -> None:
        variables = {SPEC_VARIABLE: json.dumps(asdict(spec)), "OMP_NUM_THREADS": "1"}
        try:
            self._process, self._control = fork_server.start(BODY, variables)
        except OSError as error:
            raise StartError(str(error)) from error
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONTROL_BUFFER)
        self._numbers = count()
        self._is_ready = False
        self._no_start = f"the process for reward {spec.reward_type!r} did not start; its error output has the cause"
        self._end = asyncio.ensure_future(self._wait())

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    async def wait(self) -> None:
        """Wait until the process has ended. Raises: StartError with the cause."""
        raise StartError(await asyncio.shield(self._end))

    async def start_worker(self, on_end: Callable[[], None]) -> Worker:
        """Start a worker as soon as the reward is made. Raises: StartError."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs, suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and so does our end's stream
            socket.send_fds(self._control, [as_line({"start": number})], [theirs.fileno()])
        loop = asyncio.get_running_loop()
        _, worker = await loop.create_connection(lambda: Worker(number, on_end), sock=ours)
        try:
            message = await fork_server.first_message(self.pid, worker.ready(), START_TIMEOUT_S)
            if not worker.pid:
                raise StartError(message["error"])
            return worker
        except TimeoutError as error:
            worker.close()
            raise StartError(f"a worker was not ready after {error}") from error
        except WorkerLostError as error:
            await asyncio.wait({self._end}, timeout=1.0)  # if the fork server has ended, that is the cause
            raise StartError(self._end.result() if self._end.done() else self._no_start) from error
        except BaseException:
            worker.close()
            raise

    def end_worker(self, worker: Worker) -> None:
        """Kill a worker and its child processes with SIGKILL; a big-integer power is interrupted by nothing else."""
        worker.close()
        with suppress(BrokenPipeError, ConnectionResetError):  # the fork server has ended, and its workers with it
            self._control.send(as_line({"kill": worker.number}))

    async def close(self) -> None:
        """Kill all workers and the fork server, and wait for their end."""
        self._end.cancel()
        await asyncio.gather(self._end, return_exceptions=True)
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        fork_server.wait_for_end(self._process, _END_TIMEOUT_S if self._is_ready else 0)

    async def _wait(self) -> str:
        """Read messages until the process has ended. Returns: the cause of its end."""
        cause = self._no_start
        while True:
            try:
                message = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
            except ConnectionResetError:  # it ended with unread requests; raised once, before its last messages
                continue
            if not message:
                return cause
            fields = json.loads(message)
            self._is_ready = "ready" in fields
            cause = fields.get("error", "the process that workers are forked from has ended")
