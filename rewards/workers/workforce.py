"""The scoring processes as the pool sees them: starts and ends flow in, what the processes say flows out.

One nursery and the workers that it has forked, all watched by one selector. A nursery that has died is replaced when a
worker is next wanted. Used by one thread, except for `wake` and `pids`.
"""

import json
import logging
import math
import os
import selectors
import time
from collections import deque
from contextlib import suppress
from itertools import count

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Score
from rewards.workers.channel import Channel, ChannelClosedError
from rewards.workers.nursery import Nursery
from rewards.workers.task import Task

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0  # imports take 0.7 s on an idle core; this is for a machine that is loading models
_MAX_ATTEMPTS = 2  # starts in a row that may fail, per place for a worker


class StartError(Exception):
    """No worker can be had; the message says why."""


class Worker:
    """One process. What it works on (from `deadline` on) is the business of the lanes."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        self.is_slow = False
        self.pid: int | None = None  # None until it is ready
        self.deadline = time.monotonic() + START_TIMEOUT_S  # infinite while nothing is due
        self.tasks: deque[Task] = deque()  # the first is being scored
        self.scores: list[Score] = []  # of the first task, so far
        self.started: float | None = None  # when the first task was; None while the request waits for its reader
        self.core_time_before_s = 0.0  # that the process had had of a core by then

    def core_time_s(self) -> float:
        """What the process has had of a core so far, all threads together; infinite once it is gone."""
        if self.pid is None:
            return 0.0
        try:
            return time.clock_gettime((~self.pid << 3) | 2)  # the clock that clock_getcpuclockid(3) returns
        except OSError:
            return math.inf


class Workforce:
    """The processes for `num_places` workers and more.

    Every failed start counts, a nursery's for all places, until a worker is ready: so those who wait for one get it, or
    the cause, in the end.
    """

    def __init__(self, spec: RewardSpec, *, num_places: int) -> None:
        self.workers: dict[int, Worker] = {}  # by number, in the order of their starts
        self.pids: tuple[int, ...] = ()  # of the processes that are up; replaced as a whole, for any thread to read
        self.has_failed = False  # no worker could be had, and none was ready since
        self._spec = spec
        self._num_places = num_places
        self._num_failures = 0
        self._numbers = count()
        self._nursery: Nursery | None = None
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._alarm, selectors.EVENT_READ)

    def wake(self) -> None:
        """Let `wait` return; from any thread, before `close`."""
        os.eventfd_write(self._alarm, 1)

    def start(self) -> None:
        """Start a worker. Raises: StartError."""
        number = next(self._numbers)
        try:
            if self._nursery is None:
                self._nursery = Nursery(self._spec)
                self._selector.register(self._nursery, selectors.EVENT_READ, self._nursery)
                self._note_pids()
            worker = Worker(number, Channel(self._nursery.start_worker(number)))
        except OSError as error:
            self.has_failed = True
            raise StartError(str(error)) from error
        self.workers[number] = worker
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def slow_down(self, worker: Worker) -> None:
        """From now on fresh answers go before this worker's."""
        worker.is_slow = True
        if self._nursery is not None:
            self._nursery.slow_down(worker.number)

    def send(self, worker: Worker, line: bytes) -> None:
        """Send a request, in the background if its reader is slow. A worker that is gone is told by `wait`."""
        with suppress(ChannelClosedError):
            worker.channel.send(line)
        if worker.channel.is_sending:
            self._selector.modify(worker.channel, selectors.EVENT_READ | selectors.EVENT_WRITE, worker)

    def end(self, worker: Worker) -> None:
        """Kill a worker, dead or alive, and forget it."""
        self._forget(worker)
        if self._nursery is not None:
            self._nursery.kill(worker.number)

    def give_up_start(self, worker: Worker) -> None:
        """The worker is not ready in time. Raises: StartError, when that is once too often."""
        self.end(worker)
        self._note_failure(1, f"a worker was not ready after {START_TIMEOUT_S:g} s")

    def wait(self, timeout_s: float | None) -> list[tuple[Worker, list[bytes] | None]]:
        """Wait for workers to say something, at most `timeout_s`.

        Returns: workers that are ready with the lines that they sent, maybe none (they have become ready, or have read
            a request); None instead of lines: the worker has died and is forgotten.
        Raises: StartError.
        """
        ready = self._selector.select(timeout_s)
        news: list[tuple[Worker, list[bytes] | None]] = []
        # The nursery first: that its workers die with it is one event, lest a response that is scored once more
        # comes to the next of them.
        for nursery in [key.data for key, _ in ready if isinstance(key.data, Nursery)]:
            news += self._hear_nursery(nursery)
        for key, events in ready:
            if key.fd == self._alarm:
                os.eventfd_read(self._alarm)
            elif isinstance(key.data, Worker) and key.data.number in self.workers:
                news += self._hear_worker(key.data, events)
        return news

    def dismiss(self) -> None:
        """Kill all processes and wait for their end. `start` begins anew."""
        for worker in list(self.workers.values()):
            self._forget(worker)
        self._close_nursery()

    def close(self) -> None:
        """`dismiss`, for good."""
        self.dismiss()
        self._selector.close()
        os.close(self._alarm)

    def _hear_nursery(self, nursery: Nursery) -> list[tuple[Worker, list[bytes] | None]]:
        message = nursery.receive()
        if "ready" in message:
            nursery.is_ready = True
            return []
        workers = list(self.workers.values())
        self.dismiss()
        ended = "the process that workers are forked from has ended" if nursery.is_ready else None
        self._note_failure(self._num_places, message.get("error", ended))
        return [(worker, None) for worker in workers if worker.pid is not None]

    def _hear_worker(self, worker: Worker, events: int) -> list[tuple[Worker, list[bytes] | None]]:
        try:
            if events & selectors.EVENT_WRITE:
                with suppress(ChannelClosedError):  # what it said before its end is to be read yet
                    worker.channel.flush()
                if not worker.channel.is_sending:
                    self._selector.modify(worker.channel, selectors.EVENT_READ, worker)
            lines = worker.channel.receive()
        except ChannelClosedError:
            self.end(worker)
            if worker.pid is not None:
                return [(worker, None)]
            self._note_failure(1, None)
            return []
        return [(worker, lines)] if worker.pid is not None or self._becomes_ready(worker, lines) else []

    def _becomes_ready(self, worker: Worker, lines: list[bytes]) -> bool:
        """Take a new worker's first line, if it is there. Returns: it says that the worker is ready."""
        if not lines:
            return False
        message = json.loads(lines.pop(0))
        if "ready" not in message:
            self.end(worker)
            self._note_failure(1, message.get("error"))
            return False
        worker.pid = message["ready"]
        worker.deadline = math.inf
        self.has_failed = False
        self._num_failures = 0
        self._note_pids()
        return True

    def _note_failure(self, num_places: int, cause: str | None) -> None:
        if cause is None:
            cause = f"a process for reward {self._spec.reward_type!r} does not start; its error output tells why"
        logger.warning("reward workers: %s", cause)
        self._num_failures += num_places
        if self._num_failures >= _MAX_ATTEMPTS * self._num_places:
            self._num_failures = 0
            self.has_failed = True
            raise StartError(cause)

    def _forget(self, worker: Worker) -> None:
        self._selector.unregister(worker.channel)
        worker.channel.close()
        del self.workers[worker.number]
        self._note_pids()

    def _close_nursery(self) -> None:
        if self._nursery is not None:
            self._selector.unregister(self._nursery)
            self._nursery.close()
            self._nursery = None
            self._note_pids()

    def _note_pids(self) -> None:
        nursery = () if self._nursery is None else (self._nursery.pid,)
        self.pids = (*nursery, *(worker.pid for worker in self.workers.values() if worker.pid is not None))
