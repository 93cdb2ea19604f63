"""Start workers as forks of a process that has made the reward and imported its libraries: the pool's side.

A pool has one such process. A start of Python and the imports take 0.7 s for math, a fork takes milliseconds. As their
parent it also kills the workers and collects their exit codes, so that no process id is mistaken.
`rewards/workers/worker_process.py` says what runs in these processes, and what they and the pool say to each other.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from time import monotonic
from typing import Any, cast

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Score
from rewards.workers.worker_process import BODY, SPEC_VARIABLE, as_line

START_TIMEOUT_S = 60.0  # imports take 0.7 s on an idle core; this is for a machine that is loading models
_END_TIMEOUT_S = 2.0  # to kill the workers and collect them
_CONTROL_BUFFER = 4 << 20  # bytes of requests that wait while the reward is made, as far as the machine allows
# A worker is starved if it has run for less than this share of a time limit because others had the cores. Its limit is
# then stretched, at most so many times.
_LEAST_SHARE, _MAX_STRETCH = 0.2, 5
_MAX_CPU_STRETCH = 20  # limits on the clock after which a limit of CPU time ends what does not run
_CPU_CLOCK = 2  # CPUCLOCK_SCHED of the kernel, for the clock of another process: see clock_getcpuclockid(3)


class StartError(Exception):
    """No worker can be had; the message says why."""


class WorkerLostError(Exception):
    """The worker has ended, or what it says makes no sense."""


class Worker(asyncio.Protocol):
    """A worker, seen from the pool.

    Args:
        number: by which its parent knows it.
        on_end: called when the worker has ended.
    """

    def __init__(self, number: int, on_end: Callable[[], None]) -> None:
        self.number = number
        self.pid = 0  # until it is ready
        self.has_ended = False
        self._on_end = on_end
        self._transport: asyncio.Transport
        self._lines: deque[bytes] = deque()
        self._unread = b""  # the beginning of a line
        self._news: asyncio.Future[None] | None = None  # what `_line` waits for

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio.Protocol."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """As asyncio.Protocol."""
        *lines, self._unread = (self._unread + data).split(b"\n")
        self._lines.extend(lines)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """As asyncio.Protocol."""
        self.has_ended = True
        self._wake()
        self._on_end()

    def send(self, request: bytes) -> None:
        """Send a line; what its socket does not take at once goes as it reads."""
        self._transport.write(request)

    async def ready(self) -> dict[str, Any]:
        """Return what it says first, as soon as it is there. Raises: TimeoutError; WorkerLostError."""
        message: dict[str, Any] = json.loads(await self._line(monotonic() + START_TIMEOUT_S))
        self.pid = message.get("ready", 0)
        return message

    async def scores(self, num_scores: int, timeout_s: float) -> list[Score]:
        """The next scores.

        The limit is one on the clock, but a worker that is kept from the cores goes on until it has run for a fifth of
        it, or for five times the limit: an ordinary answer is not undecided because the machine is busy.

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
                is_starved = ran_s < _LEAST_SHARE * timeout_s and waited_s > limit_s / 2
                if not is_starved or limit_s >= _MAX_STRETCH * timeout_s:
                    raise
                limit_s += timeout_s / 10
        return scores

    async def score_in_cpu_time(self, cpu_limit_s: float) -> Score:
        """The next score of a worker that computes and never waits; its limit is CPU time, however busy the machine is.

        A worker that does not get so much in twenty times as long on the clock (it is stopped, say) is lost, not late:
        its response may be scored by another.

        Raises: TimeoutError; WorkerLostError.
        """
        started, before_s, ran_s = monotonic(), self._cpu_time_s(), 0.0
        while True:
            try:
                return await self._score(monotonic() + max(cpu_limit_s - ran_s, cpu_limit_s / 50))
            except TimeoutError:
                ran_s = self._cpu_time_s() - before_s
                if ran_s >= cpu_limit_s:
                    raise
                if monotonic() - started >= _MAX_CPU_STRETCH * cpu_limit_s:
                    raise WorkerLostError("it does not run") from None

    def close(self) -> None:
        """Close the connection."""
        self._transport.abort()

    async def _score(self, until: float) -> Score:
        """The next score. Raises: TimeoutError; WorkerLostError."""
        try:
            return Score(**json.loads(await self._line(until)))
        except TimeoutError:
            if self._transport.get_write_buffer_size():  # stopped from outside, say: it has not seen the responses
                raise WorkerLostError("it does not read") from None
            raise
        except (TypeError, ValueError) as error:
            raise WorkerLostError(f"what it says is no score: {error}") from error

    async def _line(self, until: float) -> bytes:
        """The next line. What has arrived in time counts, however late this thread comes to it."""
        while not self._lines:
            if self.has_ended:
                raise WorkerLostError("it has ended")
            if until <= monotonic():
                raise TimeoutError
            loop = asyncio.get_running_loop()
            self._news = loop.create_future()
            timer = loop.call_at(until, self._wake)
            try:
                await self._news
            finally:
                timer.cancel()
        return self._lines.popleft()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _cpu_time_s(self) -> float:
        """CPU time of the process so far; 0 when it has ended."""
        try:
            return time.clock_gettime(~self.pid << 3 | _CPU_CLOCK)
        except OSError:
            return 0.0

    def _core_times_s(self) -> tuple[float, float]:
        """Return how long its first thread has run so far, and waited for a core; 0 where the kernel does not tell."""
        try:
            with open(f"/proc/{self.pid}/schedstat", "rb", buffering=0) as file:
                ran, waited, _ = file.read(100).split()
        except (OSError, ValueError):
            return 0.0, 0.0
        return int(ran) / 1e9, int(waited) / 1e9


class ForkServer:
    """The process that workers are forked from; for an event loop.

    It dies with the *thread* that made it: that is what PR_SET_PDEATHSIG watches. So make it on a thread that lives as
    long as the pool. SIGINT stays blocked in it, and in the workers, if that thread blocks SIGINT.

    Raises: StartError when there can be no further process.
    """

    def __init__(self, spec: RewardSpec) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        import_path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        # Not among the arguments, which anybody can read: a URL may hold a password.
        variables = {SPEC_VARIABLE: json.dumps(asdict(spec)), "PYTHONPATH": import_path, "OMP_NUM_THREADS": "1"}
        with theirs:
            try:
                self._process = subprocess.Popen(  # -P: imports come from where the parent's do, see PYTHONPATH
                    [sys.executable, "-P", "-c", BODY, str(theirs.fileno()), str(os.getpid()), "make"],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,  # the parent's may carry results
                    pass_fds=[theirs.fileno()],
                    env={**os.environ, **variables},
                )
            except OSError as error:
                ours.close()
                raise StartError(str(error)) from error
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CONTROL_BUFFER)
        ours.setblocking(False)
        self._control = ours
        self._numbers = count()
        self._is_ready = False
        self._no_start = f"a process for reward {spec.reward_type!r} does not start; its error output tells why"
        self._end = asyncio.ensure_future(self._wait())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def wait(self) -> None:
        """Wait for its end. Raises: StartError with the cause."""
        raise StartError(await asyncio.shield(self._end))

    async def start_worker(self, on_end: Callable[[], None]) -> Worker:
        """Have a worker forked, as soon as the reward is made. Raises: StartError."""
        number = next(self._numbers)
        ours, theirs = socket.socketpair()
        with theirs, suppress(BrokenPipeError, ConnectionResetError):  # it has ended: so does the stream of our end
            socket.send_fds(self._control, [as_line({"start": number})], [theirs.fileno()])
        loop = asyncio.get_running_loop()
        _, worker = await loop.create_connection(lambda: Worker(number, on_end), sock=ours)
        try:
            message = await worker.ready()
            if not worker.pid:
                raise StartError(message["error"])
            return worker
        except TimeoutError as error:
            worker.close()
            raise StartError(f"a worker was not ready after {START_TIMEOUT_S:g} s") from error
        except WorkerLostError as error:
            await asyncio.wait({self._end}, timeout=1.0)  # if its parent has ended, that is the cause
            raise StartError(self._end.result() if self._end.done() else self._no_start) from error
        except BaseException:
            worker.close()
            raise

    def end_worker(self, worker: Worker) -> None:
        """SIGKILL to a worker and what it has started: inside a big-integer power it listens to nothing else."""
        worker.close()
        with suppress(BrokenPipeError, ConnectionResetError):  # it has ended: its workers die with it
            self._control.send(as_line({"kill": worker.number}))

    async def close(self) -> None:
        """Kill all workers and the process and wait for their end."""
        self._end.cancel()
        await asyncio.gather(self._end, return_exceptions=True)
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(_END_TIMEOUT_S if self._is_ready else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    async def _wait(self) -> str:
        """Wait for the end of what it has to say. Returns: why it has ended."""
        cause = self._no_start
        while True:
            try:
                message = await asyncio.get_running_loop().sock_recv(self._control, 1 << 16)
            except ConnectionResetError:  # it has left requests unread: told once, before what it has said
                continue
            if not message:
                return cause
            fields = json.loads(message)
            self._is_ready = "ready" in fields
            cause = fields.get("error", "the process that workers are forked from has ended")
