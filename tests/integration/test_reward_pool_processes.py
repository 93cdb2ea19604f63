"""Test the reward pool with a fork server that is killed, stopped, or cannot make the reward."""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from coati_rl.errors import RunError
from coati_rl.reward_spec import RewardSpec
from rewards import RewardPool
from rewards.workers import worker as workers
from tests.ended import has_ended
from tests.integration.reward_pools import FIVE, Own, ready_workers, wait_until


@pytest.fixture
def own(tmp_path: Path) -> Own:
    return Own(tmp_path)


@pytest.fixture
def make_reward(tmp_path: Path) -> Callable[[str], RewardSpec]:
    """Source of a function `score` -> the reward that it is."""

    def make(source: str) -> RewardSpec:
        (tmp_path / "own.py").write_text(source)
        return RewardSpec(reward_type=f"{tmp_path}/own.py:score")

    return make


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


def test_workers_are_children_of_one_process_which_collects_and_replaces_those_that_are_killed(own: Own) -> None:
    with RewardPool(own.score, num_workers=2, timeout_s=60.0) as pool:
        first, second = ready_workers(pool, 2)
        parent = pool.worker_pids()[0]
        assert psutil.Process(parent).ppid() == os.getpid()
        assert [psutil.Process(worker).ppid() for worker in (first, second)] == [parent] * 2
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(first))  # no zombie
        ready_workers(pool, 2)
        assert pool.worker_pids()[:2] == [parent, second]


@pytest.mark.full
def test_a_fork_server_that_is_killed_while_idle_is_replaced(own: Own) -> None:
    with RewardPool(own.score, num_workers=2, timeout_s=60.0) as pool:
        ready_workers(pool, 2)
        pids = pool.worker_pids()
        os.kill(pids[0], signal.SIGKILL)
        assert pool.submit(["5"], FIVE).result(60)[0].verdict == "ok"
        wait_until(lambda: all(has_ended(pid) for pid in pids))
        ready_workers(pool, 2)


def test_a_fork_server_that_is_killed_at_work_costs_an_attempt(own: Own) -> None:
    with RewardPool(own.score, num_workers=2, timeout_s=60.0) as pool:
        ready_workers(pool, 2)
        future = pool.submit(["5", "sleep 1", "6"], FIVE)
        own.wait_for("sleep 1")
        os.kill(pool.worker_pids()[0], signal.SIGKILL)
        assert [score.verdict for score in future.result(60)] == ["ok", "wrong", "wrong"]
        assert own.calls().count("sleep 1") == 2


@pytest.mark.full
def test_a_fork_server_that_is_killed_at_its_start_is_replaced(own: Own) -> None:
    with RewardPool(own.score, timeout_s=60.0) as pool:
        wait_until(lambda: len(pool.worker_pids()) == 1)
        os.kill(pool.worker_pids()[0], signal.SIGKILL)
        assert pool.submit(["5"], FIVE).result(60)[0].verdict == "ok"


def test_a_stopped_fork_server_is_replaced_by_who_waits_for_a_worker(
    own: Own, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    close = workers.ForkServer.close

    async def close_it(server: workers.ForkServer) -> None:
        monkeypatch.setattr(workers, "START_TIMEOUT_S", 60.0)  # for the next one
        await close(server)

    with RewardPool(own.score, timeout_s=60.0) as pool:
        (worker,) = ready_workers(pool)
        stopped = pool.worker_pids()[0]
        monkeypatch.setattr(workers.ForkServer, "close", close_it)
        monkeypatch.setattr(workers, "_END_TIMEOUT_S", 0.2)
        monkeypatch.setattr(workers, "START_TIMEOUT_S", 0.3)
        os.kill(stopped, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
        assert pool.submit(["5"], FIVE).result(60)[0].verdict == "ok"
        assert stopped not in pool.worker_pids()
    assert re.search(r"a worker was not ready after 0\.[369] s", caplog.text), "again if it ran as it was stopped"


@pytest.mark.full
def test_a_reward_whose_import_computes_longer_than_the_deadline_is_waited_for(
    make_reward: Callable[[str], RewardSpec], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 4.0)
    source = "import time\nwhile time.process_time() < 4.5: pass\ndef score(response, ground_truth): return 1.0\n"
    with RewardPool(make_reward(source), timeout_s=60.0) as pool:
        assert pool.submit(["5"], FIVE).result(100)[0].reward == 1.0
    assert caplog.text == ""


def test_a_reward_whose_import_hangs_ends_at_the_deadline(
    make_reward: Callable[[str], RewardSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "START_TIMEOUT_S", 1.5)
    late = r"no reward worker can be started: a worker was not ready after [0-9.]+ s"
    source = f"import os, time\nif os.getpid() != {os.getpid()}: time.sleep(600)\ndef score(response): return 1.0"
    with RewardPool(make_reward(source), timeout_s=60.0) as pool, pytest.raises(RunError, match=late):
        pool.submit(["5"], FIVE).result(100)


def test_closing_ends_a_stopped_fork_server(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_END_TIMEOUT_S", 0.2)
    with RewardPool(own.score, timeout_s=60.0) as pool:
        (worker,) = ready_workers(pool)
        stopped = pool.worker_pids()[0]
        os.kill(stopped, signal.SIGSTOP)
    assert not psutil.pid_exists(stopped)
    wait_until(lambda: has_ended(worker))


def test_an_interrupt_from_the_keyboard_does_not_reach_the_processes(own: Own) -> None:
    with RewardPool(own.score, timeout_s=60.0) as pool:
        wait_until(lambda: bool(pool.worker_pids()))
        os.kill(pool.worker_pids()[0], signal.SIGINT)  # while it imports
        ready_workers(pool)
        pids = pool.worker_pids()
        for each in pids:
            os.kill(each, signal.SIGINT)
        assert pool.submit(["5"], FIVE).result(60)[0].verdict == "ok"
        assert pool.worker_pids() == pids


@pytest.mark.parametrize(
    ("interpreter", "cause"),
    [
        ("/bin/false", "no reward worker can be started: .*did not start"),
        ("/no/such/python", "no reward worker can be started: .*/no/such/python"),
    ],
)
def test_processes_that_cannot_start_fail_the_group_instead_of_waiting(
    interpreter: str, cause: str, own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", interpreter)
    with RewardPool(own.score, timeout_s=60.0) as pool, pytest.raises(RunError, match=cause):
        pool.submit(["5"], FIVE).result(60)


@pytest.mark.full
def test_a_reward_that_cannot_be_made_fails_each_group_with_its_cause(make_reward: Callable[[str], RewardSpec]) -> None:
    own = make_reward("""
import sys
if sys.argv[-1] == "make it once":  # in the fork server, not here
    raise OSError("no model in /models")
def score(response, ground_truth):
    return 1.0
""")
    with RewardPool(own, num_workers=2, timeout_s=60.0) as pool:
        for _ in range(2):
            with pytest.raises(
                RunError, match=r"no reward worker can be started: .*own\.py fails on import: OSError: no model in /m"
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


@pytest.mark.full
def test_a_reward_that_starts_threads_is_made_in_each_worker(make_reward: Callable[[str], RewardSpec]) -> None:
    with RewardPool(make_reward(THREADED), num_workers=2, timeout_s=60.0) as pool:
        assert [score.verdict for score in pool.submit(["5", "6", "5"], FIVE).result(60)] == ["ok", "wrong", "ok"]
        ready_workers(pool, 2)
        assert [psutil.Process(pid).num_threads() for pid in pool.worker_pids()] == [1, 2, 2]


@pytest.mark.full
def test_a_reward_with_threads_that_a_worker_cannot_make_fails_the_group_with_its_cause(
    make_reward: Callable[[str], RewardSpec],
) -> None:
    own = make_reward(
        THREADED + "if sys.argv[-1] == 'make it in each process': raise OSError('no memory on the GPU')\n"
    )
    with (
        RewardPool(own, num_workers=2, timeout_s=60.0) as pool,
        pytest.raises(RunError, match=r"no reward worker can be started: .*no memory on"),
    ):
        pool.submit(["5"], FIVE).result(60)


@pytest.mark.full
def test_what_a_reward_has_started_ends_with_its_worker(
    make_reward: Callable[[str], RewardSpec], tmp_path: Path
) -> None:
    own = make_reward("""
import os, pathlib, subprocess, time
def score(response, ground_truth):
    child = subprocess.Popen(["sleep", "600"])
    pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
    if response == "leave":
        os._exit(1)
    time.sleep(600)
""")
    with RewardPool(own, timeout_s=0.5) as pool:
        for response, detail in (("stay", "timed out after 0.5 s"), ("leave", "its scoring process died 2 times")):
            assert pool.submit([response], FIVE).result(60)[0].detail == detail
            pid = int((tmp_path / "pid").read_text())
            wait_until(lambda pid=pid: has_ended(pid))  # type: ignore[misc]
