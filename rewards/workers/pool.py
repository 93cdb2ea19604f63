"""Scores in processes of their own: groups of responses flow in, futures of their scores flow out.

`submit` returns at once. One thread gives the responses to worker processes and hears their scores; which response runs
where is said in `rewards/workers/lanes.py`, where processes come from in `rewards/workers/nursery.py`.

Not concurrent.futures or pebble, because the limit is per response (not per task), a hung process is killed without a
grace period, and a process killed from outside while idle must not break the pool (it breaks pebble's).
"""

import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType

from coati_rl.errors import ConfigError, RunError
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem, Score
from rewards.registry import make_reward
from rewards.reward import slice_of
from rewards.workers.lanes import Lanes
from rewards.workers.task import Group, Task
from rewards.workers.workforce import StartError, Workforce

_CLOSED = "the reward pool was closed before these responses were scored"


class RewardPool:
    """Scores groups of responses in worker processes, with a time limit per response (per group for batch rewards).

    Args:
        spec: what is scored with.
        num_workers: responses that are scored at once; each uses one core. As many that overran their slice of time may
            go on beside them. They share the 80 MiB of their nursery, and each adds about 12 MiB.
        timeout_s: wall time that one response may take before its verdict is "invalid".
        slice_s: a core's time after which a response makes way for others; None for the reward's own.
    Raises: ConfigError for an unknown reward type or a size that is not positive.

    The processes start at once and end with `close`, with the end of this process (also by SIGKILL), at the latest.
    """

    def __init__(
        self, spec: RewardSpec, *, num_workers: int = 1, timeout_s: float = 5.0, slice_s: float | None = None
    ) -> None:
        reward = make_reward(spec)
        if num_workers < 1 or timeout_s <= 0:
            raise ConfigError(f"num_workers is {num_workers}, timeout_s is {timeout_s:g}: both must be positive")
        if slice_s is not None and slice_s <= 0:
            raise ConfigError(f"slice_s is {slice_s:g}: it must be positive, or None for the reward's own")
        slice_s = slice_of(reward) if slice_s is None else slice_s
        self._is_batch = reward.is_batch
        # Without a slow lane a response would wait behind those before it, unless they are scored at the same time.
        self._is_chunked = slice_s is not None or getattr(reward, "is_concurrent", False)
        self._num_workers = num_workers
        self._workforce = Workforce(spec, num_places=num_workers)
        self._lanes = Lanes(
            self._workforce,
            num_workers=num_workers,
            timeout_s=timeout_s,
            slice_s=slice_s,
            settle=self._settle,
        )
        self._unsettled: set[Group] = set()  # the thread's alone
        self._lock = threading.Lock()  # guards the two below
        self._is_closed = False
        self._submitted: list[Group] = []  # not seen by the thread yet
        self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
        self._thread.start()

    def submit(self, responses: Sequence[str], problem: Problem) -> Future[list[Score]]:
        """Score the responses of one group in the background.

        Returns: a future of one score per response, in order. It fails with RunError when no worker process starts, or
            when the pool is closed first; it cannot be cancelled. Its callbacks run on the pool's thread: be brief.
        Raises: RunError when the pool is closed already.
        """
        group = Group(responses, problem, chunk_size=self._chunk_size(len(responses)))
        if not responses:
            group.future.set_result([])
        with self._lock:
            if self._is_closed:
                raise RunError("the reward pool is closed")
            if responses:
                self._submitted.append(group)
                self._workforce.wake()
        return group.future

    def _chunk_size(self, num_responses: int) -> int:
        """Responses of a group that a worker gets at a time."""
        return -(-num_responses // self._num_workers) if self._is_chunked else 1

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that are ready now, after that of the nursery that they come from."""
        return list(self._workforce.pids)

    def close(self) -> None:
        """Kill the workers and wait for their end. Unfinished groups fail with RunError; a second call does nothing."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._workforce.wake()
        self._thread.join()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        """Body of the thread. Consumes groups, waits for groups and workers, is unblocked by both, produces scores."""
        # Inherited by the processes, so that Ctrl-C cannot hit one before it ignores SIGINT.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        cause = _CLOSED
        try:
            while self._take_submitted():
                try:
                    self._lanes.step()
                except StartError as error:
                    self._lanes.clear()
                    self._workforce.dismiss()
                    self._fail_all(f"no reward worker: {error}")
        except BaseException as error:  # a fault of ours: nobody may wait for ever for a thread that is gone
            cause = f"the thread of the reward pool failed: {error!r}"
            raise
        finally:
            with self._lock:
                self._is_closed = True
                self._unsettled.update(self._submitted)
            try:
                self._workforce.close()
            finally:
                self._fail_all(cause)

    def _take_submitted(self) -> bool:
        """Queue what was submitted. Returns: the pool is open."""
        with self._lock:
            groups, self._submitted = self._submitted, []
            is_open = not self._is_closed
        for group in groups:
            self._unsettled.add(group)
            for task in group.tasks(is_batch=self._is_batch):
                self._lanes.add(task)
        return is_open

    def _settle(self, task: Task, scores: Sequence[Score]) -> None:
        if task.group.settle(task.start, scores):
            self._unsettled.remove(task.group)
            task.group.future.set_result(task.group.all_scores())

    def _fail_all(self, cause: str) -> None:
        groups, self._unsettled = self._unsettled, set()
        for group in groups:
            group.future.set_exception(RunError(cause))
