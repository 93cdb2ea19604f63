"""Score groups of responses in worker processes; `submit` returns at once.

One thread runs an event loop, with a coroutine for each worker that sends it responses, reads their scores and replaces
it. Rewards that only compute are limited in CPU time, so that a verdict does not depend on the machine's load; others,
which may wait, in wall-clock time. A response that exceeds its time limit is invalid, and its process is killed. A
response whose process died is scored once more, then it is invalid. The process's other responses are scored by another
worker, before later ones.

concurrent.futures and pebble are not used, because the limit is per response (not per task), a hung process is killed
without a grace period, and a process that is killed from outside while idle must not break the pool (as in pebble).
"""

import asyncio
import logging
import signal
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType

from coati_rl.errors import ConfigError, RunError
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem, Score
from rewards.registry import make_reward
from rewards.reward import invalid_score, only_computes
from rewards.workers.task import ResponseGroup, ScoringTask
from rewards.workers.worker import ForkServer, StartError, Worker, WorkerLostError

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 2  # per task whose process dies, and per start of the processes


class RewardPool:
    """Score groups of responses in worker processes, with a time limit per response (per group for batch rewards).

    Args:
        spec: describes the reward.
        num_workers: responses that are scored at the same time; each uses one core. They share the 80 MiB of the
            process that they are forked from, and each adds about 12 MiB.
        timeout_s: CPU time per response, in seconds, for rewards that only compute (math); beyond it the verdict is
            "invalid". For others wall-clock time, up to five times as long while other processes use the cores.
    Raises: ConfigError for an unknown reward type or a size that is not positive.

    The processes start at once and end with `close`, or at the latest when this process ends (also by SIGKILL).
    """

    def __init__(self, spec: RewardSpec, *, num_workers: int = 1, timeout_s: float = 5.0) -> None:
        reward = make_reward(spec)
        if num_workers < 1 or timeout_s <= 0:
            raise ConfigError(f"num_workers is {num_workers}, timeout_s is {timeout_s:g}: both must be positive")
        self._spec = spec
        self._is_batch = reward.is_batch
        self._only_computes = only_computes(reward)
        # In larger chunks of a slow reward responses would wait for others while a worker is idle.
        self._is_chunked = getattr(reward, "is_fast", False) or getattr(reward, "is_concurrent", False)
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._lock = threading.Lock()  # guards the next
        self._is_closed = False
        self._pids: tuple[int, ...] = ()  # of the running processes; replaced as a whole for other threads
        # From here on: used by the pool's thread only.
        self._queue: deque[ScoringTask] = deque()
        self._unsettled: set[ResponseGroup] = set()
        self._workers: list[Worker] = []
        self._num_failures = 0  # failed starts and ends of the processes since the last score
        self._loop = asyncio.new_event_loop()
        self._has_work = asyncio.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, responses: Sequence[str], problem: Problem) -> Future[list[Score]]:
        """Score the responses of one group in the background.

        Returns: a future of one score per response, in order. It fails with RunError if no worker process starts, or
            if the pool is closed before; it cannot be cancelled. Its callbacks run on the pool's thread: be brief.
        Raises: RunError if the pool is closed.
        """
        chunk_size = -(-len(responses) // self._num_workers)
        group = ResponseGroup(responses, problem, chunk_size=chunk_size if self._is_chunked else 1)
        with self._lock:
            if self._is_closed:
                raise RunError("the reward pool is closed")
            if responses:
                self._loop.call_soon_threadsafe(self._add, group)
        if not responses:
            group.future.set_result([])
        return group.future

    def worker_pids(self) -> list[int]:
        """Return the process ids of the fork server and of the workers that are ready now."""
        return list(self._pids)

    def close(self) -> None:
        """Kill the workers and wait for their end. Unfinished groups fail with RunError; a second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        """Run the thread. Consumes: groups. Waits for and is unblocked by: groups, workers. Produces: scores."""
        # Inherited by the processes, so that Ctrl-C cannot hit one before it ignores SIGINT.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        cause = "the reward pool was closed before these responses were scored"
        try:
            self._loop.run_until_complete(self._until_closed())
        except BaseException as error:  # an internal error: fail all futures, since their callers wait
            cause = f"the thread of the reward pool failed: {error!r}"
            raise
        finally:
            with self._lock:
                self._is_closed = True
            self._loop.run_until_complete(asyncio.sleep(0))  # accept what was submitted just before
            self._fail_all(cause)
            self._loop.close()

    async def _until_closed(self) -> None:
        work = asyncio.create_task(self._keep_processes())
        stop = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        if work in done:
            work.result()  # raise an internal error
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    async def _keep_processes(self) -> None:
        """Start the processes, and restart them when they have ended."""
        while True:
            try:
                await self._run_processes()
            except StartError as error:
                logger.warning("reward workers: %s", error)
                self._num_failures += 1
                if self._num_failures >= _MAX_ATTEMPTS:
                    self._num_failures = 0
                    self._fail_all(f"no reward worker can be started: {error}")
                    await self._until_work()  # try again with the next submission

    async def _run_processes(self) -> None:
        """Start and use workers. Raises: StartError if the fork server has ended, or no worker can be started."""
        server = ForkServer(self._spec)
        self._note_pids(server)
        tasks = [asyncio.create_task(self._keep_worker(server)) for _ in range(self._num_workers)]
        tasks.append(asyncio.create_task(server.wait()))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await server.close()
            self._pids = ()

    async def _keep_worker(self, server: ForkServer) -> None:
        """Use a worker, and start another one when it has ended."""
        interrupted: list[ScoringTask] = []
        try:
            while True:
                worker = await server.start_worker(on_end=self._has_work.set)
                self._workers.append(worker)
                self._note_pids(server)
                # Only after a successful start: if the fork server died, the other workers are about to die, too.
                self._put_back(interrupted)
                interrupted = []
                try:
                    interrupted = await self._give_work(worker)
                finally:
                    self._workers.remove(worker)
                    self._note_pids(server)
                    server.end_worker(worker)
        finally:
            self._put_back(interrupted)

    async def _give_work(self, worker: Worker) -> list[ScoringTask]:
        """Send chunks to a worker until it has ended or must be ended. Returns: the task that was interrupted."""
        while await self._until_work(worker):
            chunk = self._next_chunk()
            try:
                await self._score(worker, chunk)
            except TimeoutError:
                task = chunk.popleft()
                limit = f"{self._timeout_s:g} s" + (" of CPU time" if self._only_computes else "")
                self._settle(task, [invalid_score(f"timed out after {limit}")] * task.size)
                return []
            except WorkerLostError as error:
                return self._after_death(chunk.popleft(), "" if worker.has_ended else f" ({error})")
            except asyncio.CancelledError:
                chunk.extendleft(self._after_death(chunk.popleft()))
                raise
            finally:
                self._put_back(chunk)
        return []

    async def _until_work(self, worker: Worker | None = None) -> bool:
        """Wait for a task in the queue. Returns: False if the worker has ended."""
        while not self._queue:
            if worker is not None and worker.has_ended:
                return False
            self._has_work.clear()
            await self._has_work.wait()
        return True

    async def _score(self, worker: Worker, chunk: deque[ScoringTask]) -> None:
        """Score a chunk, removing finished tasks. Raises: TimeoutError for its first task; WorkerLostError."""
        worker.send(chunk[0].group.request(chunk[0].start, chunk[-1].stop))
        while chunk:
            if self._only_computes:
                scores = [await worker.score_in_cpu_time(self._timeout_s)]
            else:
                scores = await worker.scores(chunk[0].size, self._timeout_s)
            self._settle(chunk.popleft(), scores)

    def _next_chunk(self) -> deque[ScoringTask]:
        chunk = deque([self._queue.popleft()])
        group = chunk[0].group
        while self._queue and self._queue[0].group is group and len(chunk) < group.chunk_size:
            chunk.append(self._queue.popleft())
        return chunk

    def _put_back(self, tasks: Sequence[ScoringTask]) -> None:
        self._queue.extendleft(reversed(tasks))
        if tasks:
            self._has_work.set()

    def _after_death(self, task: ScoringTask, reason: str = "") -> list[ScoringTask]:
        """Return the task whose process died, to be scored again, or settle it as invalid after the last attempt."""
        num_deaths = task.num_deaths + 1
        if num_deaths < _MAX_ATTEMPTS:
            return [replace(task, num_deaths=num_deaths)]
        self._settle(task, [invalid_score(f"its scoring process died {num_deaths} times{reason}")] * task.size)
        return []

    def _add(self, group: ResponseGroup) -> None:
        self._unsettled.add(group)
        self._queue.extend(group.tasks(is_batch=self._is_batch))
        self._has_work.set()

    def _settle(self, task: ScoringTask, scores: Sequence[Score]) -> None:
        self._num_failures = 0
        if task.group.settle(task.start, scores):
            self._unsettled.remove(task.group)
            task.group.future.set_result(task.group.all_scores())

    def _fail_all(self, cause: str) -> None:
        self._queue.clear()
        groups, self._unsettled = self._unsettled, set()
        for group in groups:
            group.future.set_exception(RunError(cause))

    def _note_pids(self, server: ForkServer) -> None:
        self._pids = (server.pid, *(worker.pid for worker in self._workers))
