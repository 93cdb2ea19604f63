"""Define a reward that executes commands in responses and records calls, and functions that wait for a condition."""

import time
from collections.abc import Callable
from pathlib import Path

import psutil

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool

FIVE = Problem(ground_truth="5")
# "sleep 1.5" takes 1.5 s of the clock, "compute 1.5" as much of a core. Each other call is a line in the file `calls`.
SOURCE = """
import asyncio, os, pathlib, time

def note(call):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
        calls.write(f"{call}\\n")

def score(response, ground_truth):
    if not response.startswith("compute"):  # which waits for a core alone, and not for a busy disk
        note(response[:20])
    if response.startswith("sleep"):
        time.sleep(float(response.split()[1]))
    if response.startswith("compute"):
        end = time.process_time() + float(response.split()[1])
        while time.process_time() < end:
            pass
    if response == "power":
        return 9 ** 9 ** len(response) ** len(response)  # hours inside one big-integer multiplication
    return float(response == ground_truth)

async def score_at_once(response, ground_truth):
    note(response)
    if response == "wait":
        await asyncio.sleep(600)
    return float(response == ground_truth)

def score_group(queries, prompts, labels):
    note(queries)
    for query in queries:
        if query.startswith("sleep"):
            time.sleep(float(query.split()[1]))
        if query == "die":
            os._exit(1)
    return [float(len(queries)) for _ in queries]
"""


class Own:
    """The reward, in a directory of a test's own."""

    def __init__(self, directory: Path) -> None:
        (directory / "own.py").write_text(SOURCE)
        self._calls = directory / "calls"
        self.score, self.at_once, self.group = (
            RewardSpec(reward_type=f"{directory}/own.py:{name}") for name in ("score", "score_at_once", "score_group")
        )

    def calls(self) -> list[str]:
        """All calls since the last `forget`."""
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def forget(self) -> None:
        """Begin anew."""
        self._calls.unlink(missing_ok=True)

    def wait_for(self, call: str, times: int = 1) -> None:
        """Wait until a response is being scored."""
        wait_until(lambda: self.calls().count(call) == times)


def wait_until(claim: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def ready_workers(pool: RewardPool, count: int = 1) -> list[int]:
    """Process ids of the workers, once there are `count`. The first process is the one that they are forked from.

    It waits for a request then: before, it may have the socket of the last worker, whose end would not be seen if it is
    stopped.
    """
    wait_until(lambda: len(pool.worker_pids()) == 1 + count)
    wait_until(lambda: psutil.Process(pool.worker_pids()[0]).status() == psutil.STATUS_SLEEPING)
    return pool.worker_pids()[1:]
