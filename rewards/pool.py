"""Scores in processes of their own: groups of responses flow in, futures of their scores flow out.

`submit` returns at once. Chunks of a group wait in one queue; each thread of the pool owns one worker process and takes
chunks from there. A response that passes its time limit costs its process and itself: it is invalid, what is left of
its chunk goes back to the front of the queue. A response whose process died is scored once more, then it is invalid.

Threads, not concurrent.futures or pebble, because the limit is per response (not per task), a hung process is killed
without a grace period, and a process killed from outside while idle must not break the pool (it breaks pebble's).
"""

import logging
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType

from coati_rl.errors import ConfigError, RunError
from coati_rl.types import Score
from rewards.registry import get_reward
from rewards.worker import WorkerDiedError, WorkerProcess, WorkerTimeoutError, invalid_score

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2  # per response whose process dies, and per process that does not start


class _Group:
    """The responses of one `submit` and what is known of them. Guarded by the pool's lock."""

    def __init__(self, responses: Sequence[str], ground_truth: str) -> None:
        self.responses = list(responses)
        self.ground_truth = ground_truth
        self.future: Future[list[Score]] = Future()
        self.future.set_running_or_notify_cancel()  # not cancellable: a worker may be in the middle of it
        self.scores: dict[int, Score] = {}

    def settled_scores(self) -> list[Score] | None:
        """All scores in the order of the responses, or None while some are missing."""
        if len(self.scores) < len(self.responses):
            return None
        return [self.scores[index] for index in range(len(self.responses))]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Responses start..stop of a group, which one process scores in this order."""

    group: _Group
    start: int
    stop: int
    num_deaths: int = 0  # processes that died over the first response


class RewardPool:
    """Scores groups of responses in worker processes, with a time limit per response.

    Args:
        name: a reward type, as for `get_reward`.
        num_workers: processes; each uses one core while it scores and about 80 MiB.
        timeout_s: wall time that one response may take before its verdict is "invalid".
    Raises: ConfigError for an unknown reward type or a size that is not positive.

    The processes start at once and end with `close`, with the end of this process (also by SIGKILL), at the latest.
    """

    def __init__(self, name: str, *, num_workers: int = 1, timeout_s: float = 5.0) -> None:
        get_reward(name)
        if num_workers < 1 or timeout_s <= 0:
            raise ConfigError(f"num_workers is {num_workers}, timeout_s is {timeout_s:g}: both must be positive")
        self._name = name
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._changed = threading.Condition()  # guards all below
        self._is_closed = False
        self._chunks: deque[_Chunk] = deque()
        self._unsettled: set[_Group] = set()
        self._workers: dict[int, WorkerProcess] = {}  # by the index of their thread
        self._threads = [
            threading.Thread(target=self._run, args=(index,), name=f"reward-{index}", daemon=True)
            for index in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, responses: Sequence[str], ground_truth: str) -> Future[list[Score]]:
        """Score the responses of one group in the background.

        Returns: a future of one score per response, in order. It fails with RunError when no worker process starts, or
            when the pool is closed first; it cannot be cancelled.
        Raises: RunError when the pool is closed already.
        """
        group = _Group(responses, ground_truth)
        size = -(-len(responses) // self._num_workers)
        with self._changed:
            if self._is_closed:
                raise RunError("the reward pool is closed")
            if responses:
                self._unsettled.add(group)
            for start in range(0, len(responses), max(size, 1)):
                self._chunks.append(_Chunk(group=group, start=start, stop=min(start + size, len(responses))))
            self._changed.notify_all()
        if not responses:
            group.future.set_result([])
        return group.future

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        with self._changed:
            return [worker.pid for worker in self._workers.values()]

    def close(self) -> None:
        """Kill the workers and wait for their end. Unfinished groups fail with RunError; a second call does nothing."""
        with self._changed:
            self._is_closed = True
            for worker in self._workers.values():
                worker.kill()
            self._changed.notify_all()
        self._fail_all(RunError("the reward pool was closed before these responses were scored"))
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, index: int) -> None:
        """Body of a thread. Consumes chunks, waits for the queue and for its process, is unblocked by `close`."""
        # Inherited by the processes, so that Ctrl-C cannot hit one before it ignores SIGINT.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with suppress(OSError):  # a process that cannot be made is reported to the first group that needs it
                self._start_worker(index)
            while (chunk := self._next_chunk()) is not None:
                try:
                    worker = self._ready_worker(index)
                except (RunError, OSError) as error:
                    self._fail(chunk.group, RunError(f"no reward worker: {error}"))
                else:
                    self._score(worker, chunk)
        except BaseException as error:  # a fault of ours: nobody may wait for ever for a thread that is gone
            self._fail_all(RunError(f"a thread of the reward pool failed: {error!r}"))
            raise
        finally:
            self._stop_worker(index)

    def _next_chunk(self) -> _Chunk | None:
        """The next chunk, None once the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._chunks or self._is_closed)
            return None if self._is_closed else self._chunks.popleft()

    def _score(self, worker: WorkerProcess, chunk: _Chunk) -> None:
        """Score a chunk up to its end, or up to the response that costs the process."""
        group, index = chunk.group, chunk.start
        try:
            worker.send(group.responses[chunk.start : chunk.stop], group.ground_truth)
            for index in range(chunk.start, chunk.stop):
                self._settle(group, index, worker.receive(self._timeout_s))
        except WorkerTimeoutError:
            worker.close()
            self._put_back(replace(chunk, start=index + 1, num_deaths=0))
            self._settle(group, index, invalid_score(f"timed out after {self._timeout_s:g} s"))
        except WorkerDiedError:
            worker.close()
            num_deaths = chunk.num_deaths + 1 if index == chunk.start else 1
            if num_deaths < _MAX_ATTEMPTS:
                self._put_back(replace(chunk, start=index, num_deaths=num_deaths))
            else:
                self._put_back(replace(chunk, start=index + 1, num_deaths=0))
                self._settle(group, index, invalid_score(f"its scoring process died {num_deaths} times"))

    def _put_back(self, chunk: _Chunk) -> None:
        with self._changed:
            if chunk.start < chunk.stop and not self._is_closed:
                self._chunks.appendleft(chunk)
                self._changed.notify()

    def _settle(self, group: _Group, index: int, score: Score) -> None:
        with self._changed:
            group.scores[index] = score
            scores = group.settled_scores()
            if scores is None or group not in self._unsettled:
                return
            self._unsettled.remove(group)
        group.future.set_result(scores)  # outside of the lock: it runs the caller's callbacks

    def _fail(self, group: _Group, error: RunError) -> None:
        with self._changed:
            if group not in self._unsettled:
                return
            self._unsettled.remove(group)
            self._chunks = deque(chunk for chunk in self._chunks if chunk.group is not group)
        group.future.set_exception(error)

    def _fail_all(self, error: RunError) -> None:
        with self._changed:
            groups, self._unsettled = self._unsettled, set()
            self._chunks.clear()
        for group in groups:
            group.future.set_exception(error)

    def _ready_worker(self, index: int) -> WorkerProcess:
        """The thread's process, started anew when it has ended.

        Raises: RunError when it does not start, after as many attempts as a response has.
        """
        for _ in range(_MAX_ATTEMPTS):
            worker = self._workers.get(index)
            if worker is None or not worker.is_alive:
                self._stop_worker(index)
                worker = self._start_worker(index)
            try:
                worker.wait_ready()
                return worker
            except (WorkerDiedError, WorkerTimeoutError):
                logger.warning("reward worker %d ended before it was ready: exit code %s", worker.pid, worker.close())
        raise RunError(f"a process for reward {self._name!r} does not start; its error output tells why")

    def _start_worker(self, index: int) -> WorkerProcess:
        worker = WorkerProcess(self._name)
        with self._changed:
            self._workers[index] = worker
            if self._is_closed:
                worker.kill()
        return worker

    def _stop_worker(self, index: int) -> None:
        with self._changed:
            worker = self._workers.pop(index, None)
        if worker is not None:
            worker.close()
