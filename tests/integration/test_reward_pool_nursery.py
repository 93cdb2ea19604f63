"""Where the reward pool's workers come from: a nursery that is killed, stopped, or cannot make the reward."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from coati_rl.errors import RunError
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool
from rewards.workers import workforce

FIVE = Problem(ground_truth="5")


@pytest.fixture
def make_own(tmp_path: Path) -> Callable[[str], RewardSpec]:
    """Source of a function `score` -> the reward that it is."""

    def make(source: str) -> RewardSpec:
        (tmp_path / "own.py").write_text(source)
        return RewardSpec(reward_type=f"{tmp_path}/own.py:score")

    return make


@pytest.fixture
def own(make_own: Callable[[str], RewardSpec]) -> RewardSpec:
    return make_own("""
import time
def score(response, ground_truth):
    if response.startswith("sleep"):
        time.sleep(float(response.split()[1]))
    return float(response == ground_truth)
""")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


def wait_until(claim: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def is_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_workers_are_children_of_the_nursery_and_it_of_this_process(own: RewardSpec) -> None:
    with RewardPool(own, num_workers=3) as pool:
        wait_until(lambda: len(pool.worker_pids()) == 4)
        nursery, *workers = pool.worker_pids()
        assert psutil.Process(nursery).ppid() == os.getpid()
        assert [psutil.Process(worker).ppid() for worker in workers] == [nursery] * 3


def test_a_killed_worker_is_collected_and_replaced(own: RewardSpec) -> None:
    with RewardPool(own, num_workers=2) as pool:
        wait_until(lambda: len(pool.worker_pids()) == 3)
        nursery, first, second = pool.worker_pids()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(first))  # no zombie
        wait_until(lambda: len(pool.worker_pids()) == 3)
        assert pool.worker_pids()[:2] == [nursery, second]


def test_a_nursery_that_is_killed_while_idle_is_replaced(own: RewardSpec) -> None:
    with RewardPool(own, num_workers=2) as pool:
        wait_until(lambda: len(pool.worker_pids()) == 3)
        pids = pool.worker_pids()
        os.kill(pids[0], signal.SIGKILL)
        assert pool.submit(["5"], FIVE).result(60)[0].verdict == "ok"
        wait_until(lambda: all(is_ended(pid) for pid in pids))
        wait_until(lambda: len(pool.worker_pids()) == 3)


def test_a_nursery_that_is_killed_at_work_costs_an_attempt(own: RewardSpec) -> None:
    with RewardPool(own, num_workers=2, timeout_s=30.0, slice_s=0.1) as pool:
        wait_until(lambda: len(pool.worker_pids()) == 3)
        future = pool.submit(["5", "sleep 1", "6"], FIVE)
        time.sleep(0.5)  # the second response is in the slow lane
        os.kill(pool.worker_pids()[0], signal.SIGKILL)
        assert [score.verdict for score in future.result(60)] == ["ok", "wrong", "wrong"]


def test_a_nursery_that_is_killed_at_its_start_is_replaced(own: RewardSpec) -> None:
    with RewardPool(own) as pool:
        wait_until(lambda: len(pool.worker_pids()) == 1)
        os.kill(pool.worker_pids()[0], signal.SIGKILL)
        assert pool.submit(["5"], FIVE).result(60)[0].verdict == "ok"


def test_a_stopped_nursery_fails_who_waits_for_a_worker_and_is_replaced(
    own: RewardSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RewardPool(own) as pool:
        wait_until(lambda: len(pool.worker_pids()) == 2)
        nursery, worker = pool.worker_pids()
        monkeypatch.setattr(workforce, "START_TIMEOUT_S", 0.5)
        os.kill(nursery, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(RunError, match=r"no reward worker: a worker was not ready after 0\.5 s"):
            pool.submit(["5"], FIVE).result(60)
        monkeypatch.setattr(workforce, "START_TIMEOUT_S", 60.0)
        assert pool.submit(["5"], FIVE).result(60)[0].verdict == "ok"
        assert nursery not in pool.worker_pids()


def test_closing_ends_a_stopped_nursery(own: RewardSpec) -> None:
    with RewardPool(own) as pool:
        wait_until(lambda: len(pool.worker_pids()) == 2)
        pids = pool.worker_pids()
        os.kill(pids[0], signal.SIGSTOP)
    assert not psutil.pid_exists(pids[0])
    wait_until(lambda: is_ended(pids[1]))


def test_a_reward_that_cannot_be_made_fails_the_group_with_its_cause(make_own: Callable[[str], RewardSpec]) -> None:
    own = make_own("""
import sys
if sys.argv[0] == "-c":  # in the nursery, not here
    raise OSError("no model in /models")
def score(response, ground_truth):
    return 1.0
""")
    with RewardPool(own, num_workers=2) as pool:
        for _ in range(2):
            with pytest.raises(
                RunError, match=r"no reward worker: .*own\.py fails on import: OSError: no model in /mod"
            ):
                pool.submit(["5", "6"], FIVE).result(60)


THREADED = """
import sys
from concurrent.futures import ThreadPoolExecutor
executor = ThreadPoolExecutor(1)
executor.submit(int).result()  # its thread runs from now on
def score(response, ground_truth):
    return executor.submit(lambda: float(response == ground_truth)).result()
"""


def test_a_reward_that_starts_threads_is_made_in_each_worker(make_own: Callable[[str], RewardSpec]) -> None:
    with RewardPool(make_own(THREADED), num_workers=2, timeout_s=2.0, slice_s=1.0) as pool:
        future = pool.submit(["5", "6", "5"], FIVE)
        assert [score.verdict for score in future.result(60)] == ["ok", "wrong", "ok"]
        wait_until(lambda: len(pool.worker_pids()) == 3)
        assert [psutil.Process(pid).num_threads() for pid in pool.worker_pids()] == [1, 2, 2]


def test_a_reward_with_threads_that_a_worker_cannot_make_fails_the_group_with_its_cause(
    make_own: Callable[[str], RewardSpec],
) -> None:
    own = make_own(THREADED + "if sys.argv[-1] == 'leave it to the workers': raise OSError('no memory on the GPU')\n")
    with RewardPool(own, num_workers=2) as pool, pytest.raises(RunError, match=r"no reward worker: .*no memory on the"):
        pool.submit(["5"], FIVE).result(60)


def test_what_a_reward_has_started_ends_with_its_worker(make_own: Callable[[str], RewardSpec], tmp_path: Path) -> None:
    own = make_own("""
import pathlib, subprocess, time
def score(response, ground_truth):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
    if response == "leave":
        import os
        os._exit(1)
    time.sleep(600)
""")
    with RewardPool(own, timeout_s=0.5) as pool:
        for response, detail in (("stay", "timed out after 0.5 s"), ("leave", "its scoring process died 2 times")):
            assert pool.submit([response], FIVE).result(60)[0].detail == detail
            pid = int((tmp_path / "pid").read_text())
            wait_until(lambda pid=pid: is_ended(pid))  # type: ignore[misc]
