"""Which answer runs where and for how long: tasks flow in, their scores flow out, and no answer holds up the others.

An answer begins in the fast lane, with a slice of a core's time. One that overruns it goes to the slow lane with its
process, as it is, and a fresh process takes its place; when the slow lane is full, the process is killed and the answer
waits, to be scored from the start when there is room. So an answer occupies a place in the fast lane for a slice at
most, and waits for nothing but the slices before it. Each lane has as many places as there are workers.

A slice is of a core's time, not of the clock's: on a busy machine ordinary answers would overrun as well and then wait
behind all that is poisonous. For those that sleep it ends by the clock, after `_MAX_STRETCH` as much.

An answer that passes its time limit costs its process and itself: it is invalid. One whose process died is scored once
more, then it is invalid. What a process had before it besides is scored by another, before all that came later.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import monotonic

from coati_rl.types import Score
from rewards.reward import invalid_score
from rewards.workers.task import Task
from rewards.workers.workforce import Worker, Workforce

_MAX_ATTEMPTS = 2  # per task whose process dies
_MAX_QUICK = 8  # tasks that a worker gets at once if that can be more than a chunk: asking costs 0.1 ms, as scoring may
_MAX_QUICK_BYTES = 1 << 15  # of the requests for them
_MAX_STRETCH = 5  # clock time of a slice, in slices
_LEAST_STEP_S = 0.01  # between two looks at the time that a process has had
_READ_TIMEOUT_S = 2.0  # for a request; a worker that does not read is stopped, or hangs outside of any answer


class Lanes:
    """Gives tasks to the workers of `workforce`. Used by one thread.

    Args:
        num_workers: places in each lane.
        timeout_s: wall time that a task may take, from when it starts to run.
        slice_s: a core's time of it in the fast lane; None for all of it: there is no slow lane then.
        settle: takes the scores of a task.
    """

    def __init__(
        self,
        workforce: Workforce,
        *,
        num_workers: int,
        timeout_s: float,
        slice_s: float | None,
        settle: Callable[[Task, Sequence[Score]], None],
    ) -> None:
        self._workforce = workforce
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._slice_s = timeout_s if slice_s is None else min(slice_s, timeout_s)
        self._has_slow_lane = self._slice_s < timeout_s
        self._settle = settle
        self._fresh: deque[Task] = deque()  # wait for the fast lane
        self._delayed: deque[Task] = deque()  # wait for the slow lane

    def add(self, task: Task) -> None:
        """Queue a task behind all others."""
        self._fresh.append(task)

    def clear(self) -> None:
        """Forget all that waits."""
        self._fresh.clear()
        self._delayed.clear()

    def step(self) -> None:
        """Give work, wait for something to happen, and see to it. Raises: StartError when no worker can be had."""
        self._give_work()
        self._start_workers()
        before = monotonic()
        due = min((worker.deadline for worker in self._workforce.workers.values()), default=math.inf)
        news = self._workforce.wait(None if due == math.inf else max(due - before, 0.0))
        now = monotonic()
        for worker, lines in news:
            if lines is None:
                self._lose(worker)
            else:
                self._hear(worker, lines, now)
        # As of the time before the look at the sockets: what was said in time counts, however late this thread comes.
        for worker in [worker for worker in self._workforce.workers.values() if worker.deadline <= before]:
            self._overrun(worker)

    def _start_workers(self) -> None:
        if self._workforce.has_failed and not (self._fresh or self._delayed):
            return  # the next who needs a worker will try
        num_fast = len(self._workforce.workers) - self._num_slow()
        for _ in range(self._num_workers - num_fast):
            self._workforce.start()

    def _num_slow(self) -> int:
        return sum(worker.is_slow for worker in self._workforce.workers.values())

    def _give_work(self) -> None:
        for worker in self._workforce.workers.values():
            if worker.pid is None or worker.tasks:
                continue
            if self._delayed and self._num_slow() < self._num_workers:
                # It leaves for the slow lane, which so waits for no start of a process.
                worker.tasks.append(self._delayed.popleft())
                request = _request(worker.tasks)
                self._workforce.slow_down(worker)
            elif self._fresh:
                request = self._take_fresh(worker.tasks)
            else:
                return  # nor is there any for the others
            self._workforce.send(worker, request)
            worker.started = None
            if worker.channel.is_sending:
                worker.deadline = monotonic() + _READ_TIMEOUT_S
            else:
                self._start_clock(worker, monotonic())

    def _take_fresh(self, tasks: deque[Task]) -> bytes:
        """Move the next tasks of the queue to `tasks`: a group's, and more while many quick and short ones wait.

        Returns: the lines that ask for them. If there are several a socket holds them all, so that none waits outside
            while the first is scored already.
        """
        share = min(len(self._fresh) // self._num_workers, _MAX_QUICK) if self._has_slow_lane else 1
        request = b""
        while self._fresh and (not tasks or len(tasks) < share):
            chunk = [self._fresh.popleft()]
            group = chunk[0].group
            while self._fresh and self._fresh[0].group is group and len(chunk) < group.chunk_size:
                chunk.append(self._fresh.popleft())
            line = _request(chunk)
            if tasks and len(request) + len(line) > _MAX_QUICK_BYTES:
                self._fresh.extendleft(reversed(chunk))
                break
            request += line
            tasks.extend(chunk)
        return request

    def _start_clock(self, worker: Worker, now: float) -> None:
        """The first task starts to run: the worker has read what it is about."""
        worker.started = now
        worker.core_time_before_s = worker.core_time_s()
        worker.deadline = now + (self._timeout_s if worker.is_slow else self._slice_s)

    def _hear(self, worker: Worker, lines: list[bytes], now: float) -> None:
        for line in lines:
            score = _as_score(line)
            if score is None or not worker.tasks:  # it speaks of something else: not to be trusted any more
                self._workforce.end(worker)
                self._lose(worker)
                return
            worker.scores.append(score)
            if len(worker.scores) < worker.tasks[0].size:
                continue
            task, scores, worker.scores = worker.tasks.popleft(), worker.scores, []
            worker.started, worker.deadline = None, math.inf
            if worker.is_slow:  # slow for good: an ordinary user's process cannot get its priority back
                self._workforce.end(worker)
            self._settle(task, scores)
            if worker.is_slow:
                return
        if worker.tasks and worker.started is None and (lines or not worker.channel.is_sending):
            self._start_clock(worker, now)

    def _overrun(self, worker: Worker) -> None:
        if worker.pid is None:
            self._workforce.give_up_start(worker)
        elif worker.started is None:
            self._workforce.end(worker)
            self._lose(worker)
        elif worker.deadline >= worker.started + self._timeout_s:
            self._workforce.end(worker)
            self._take_back_rest(worker)
            task = worker.tasks.popleft()
            self._settle(task, [invalid_score(f"timed out after {self._timeout_s:g} s")] * task.size)
        else:
            self._end_slice(worker, worker.started)

    def _end_slice(self, worker: Worker, started: float) -> None:
        left_s = self._slice_s - (worker.core_time_s() - worker.core_time_before_s)
        end = started + min(self._slice_s * _MAX_STRETCH, self._timeout_s)
        if left_s > 0 and worker.deadline < end:
            worker.deadline = min(worker.deadline + max(left_s, _LEAST_STEP_S), end)
            return
        self._take_back_rest(worker)
        if self._num_slow() < self._num_workers:
            # It would go on to what was taken back: it is ended as soon as the score of this task is here.
            worker.deadline = started + self._timeout_s
            self._workforce.slow_down(worker)
        else:
            self._workforce.end(worker)
            self._delayed.append(worker.tasks.popleft())

    def _lose(self, worker: Worker) -> None:
        """A worker has died: see to what it had."""
        if not worker.tasks:
            return
        self._take_back_rest(worker)
        task = worker.tasks.popleft()
        num_deaths = task.num_deaths + 1
        if num_deaths < _MAX_ATTEMPTS:
            queue = self._delayed if worker.is_slow else self._fresh
            queue.appendleft(replace(task, num_deaths=num_deaths))
        else:
            self._settle(task, [invalid_score(f"its scoring process died {num_deaths} times")] * task.size)

    def _take_back_rest(self, worker: Worker) -> None:
        """All but the first task of a worker goes to the front of the queue."""
        while len(worker.tasks) > 1:
            self._fresh.appendleft(worker.tasks.pop())


def _request(tasks: Sequence[Task]) -> bytes:
    """The line that asks for the scores of consecutive tasks of one group."""
    return tasks[0].group.request(tasks[0].start, tasks[-1].stop)


def _as_score(line: bytes) -> Score | None:
    try:
        return Score(**json.loads(line))
    except (TypeError, ValueError):
        return None
