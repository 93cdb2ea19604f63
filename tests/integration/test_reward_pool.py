"""The reward pool under poisonous answers, killed workers and killed parents. Real processes, nothing replaced."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from coati_rl.errors import ConfigError, RunError
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool

REPOSITORY = Path(__file__).parents[2]
BOXED = RewardSpec(reward_type="boxed")
FIVE = Problem(ground_truth="5")
OWN = """
import time

def score(response, ground_truth):
    if response == "sleep":
        time.sleep(3600)
    if response == "power":
        return 9 ** 9 ** len(response) ** len(response)  # hours inside one big-integer multiplication
    return float(response.strip() == ground_truth)
"""


@pytest.fixture
def own(tmp_path: Path) -> RewardSpec:
    """A reward that takes as long as the response says."""
    (tmp_path / "own.py").write_text(OWN)
    return RewardSpec(reward_type=f"{tmp_path}/own.py:score")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


def is_running(pid: int) -> bool:
    """False once the process has ended, also while nobody has collected its exit code."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(claim: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)


def ready_workers(pool: RewardPool, count: int = 1) -> list[int]:
    """Process ids of the workers, once there are `count`. The first process is the nursery."""
    wait_until(lambda: len(pool.worker_pids()) == 1 + count)
    return pool.worker_pids()[1:]


def test_a_group_is_scored_in_the_order_of_its_responses() -> None:
    with RewardPool(BOXED, num_workers=2) as pool:
        future = pool.submit([r"\boxed{4}", r"\boxed{5}", "no box", r"\boxed{5.0}", r"\boxed{-5}"], FIVE)
        assert [score.verdict for score in future.result(60)] == ["wrong", "ok", "wrong", "ok", "wrong"]


def test_many_groups_are_in_flight_at_once_and_none_is_lost() -> None:
    with RewardPool(BOXED, num_workers=2) as pool:
        futures = [
            pool.submit([rf"\boxed{{{number}}}", r"\boxed{x}"], Problem(ground_truth=str(number)))
            for number in range(200)
        ]
        verdicts = {tuple(score.verdict for score in future.result(60)) for future in futures}
    assert verdicts == {("ok", "wrong")}


def test_an_empty_group_has_no_scores() -> None:
    with RewardPool(BOXED) as pool:
        assert pool.submit([], FIVE).result(1) == []


def test_the_time_limit_holds_inside_one_instruction_and_costs_its_own_sample_only(own: RewardSpec) -> None:
    with RewardPool(own, timeout_s=1.0) as pool:
        started = time.monotonic()
        scores = pool.submit(["5", "power", "5", "6"], FIVE).result(60)
        elapsed_s = time.monotonic() - started
    assert [score.verdict for score in scores] == ["ok", "invalid", "ok", "wrong"]
    assert scores[1].detail == "timed out after 1 s"
    assert elapsed_s < 10  # 1 s and the start


def test_the_time_limit_counts_from_when_a_response_starts_to_run(own: RewardSpec) -> None:
    with RewardPool(own, timeout_s=1.0) as pool:
        details = [score.detail for score in pool.submit(["sleep", "sleep", "sleep"], FIVE).result(60)]
    assert details == ["timed out after 1 s"] * 3


def test_samples_of_a_killed_worker_are_scored_again(own: RewardSpec) -> None:
    with RewardPool(own, timeout_s=2.0) as pool:
        (pid,) = ready_workers(pool)
        future = pool.submit(["5", "sleep", "6"], FIVE)
        time.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        scores = future.result(60)
    assert [score.verdict for score in scores] == ["ok", "invalid", "wrong"]
    assert scores[1].detail == "timed out after 2 s"  # its second attempt, not its first


def test_a_sample_whose_worker_dies_twice_is_invalid_and_the_others_are_scored(own: RewardSpec) -> None:
    with RewardPool(own, timeout_s=60.0) as pool:
        (first,) = ready_workers(pool)
        future = pool.submit(["5", "sleep", "6"], FIVE)
        time.sleep(0.2)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: len(pool.worker_pids()) == 2 and pool.worker_pids()[1] != first)
        time.sleep(0.2)
        os.kill(pool.worker_pids()[1], signal.SIGKILL)
        scores = future.result(60)
    assert [score.verdict for score in scores] == ["ok", "invalid", "wrong"]
    assert scores[1].detail == "its scoring process died 2 times"


def test_a_worker_killed_while_idle_is_replaced() -> None:
    with RewardPool(BOXED) as pool:
        (pid,) = ready_workers(pool)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        assert pool.submit([r"\boxed{5}"], FIVE).result(60)[0].verdict == "ok"


def test_a_stopped_worker_costs_time_not_the_run() -> None:
    with RewardPool(BOXED, timeout_s=1.0) as pool:
        (pid,) = ready_workers(pool)
        os.kill(pid, signal.SIGSTOP)
        long_responses = [r"\boxed{5}" + " " * 400_000] * 3  # more than the socket holds
        scores = pool.submit(long_responses, FIVE).result(60)
    assert [score.verdict for score in scores] == ["ok", "ok", "ok"]


def test_an_interrupt_from_the_keyboard_does_not_reach_the_processes() -> None:
    with RewardPool(BOXED) as pool:
        wait_until(lambda: bool(pool.worker_pids()))
        os.kill(pool.worker_pids()[0], signal.SIGINT)  # while it imports
        ready_workers(pool)
        pids = pool.worker_pids()
        for each in pids:
            os.kill(each, signal.SIGINT)
        assert pool.submit([r"\boxed{5}"], FIVE).result(60)[0].verdict == "ok"
        assert pool.worker_pids() == pids


def test_closing_leaves_no_process_and_fails_what_is_unfinished(own: RewardSpec) -> None:
    pool = RewardPool(own, num_workers=2, timeout_s=60.0)
    future = pool.submit(["power", "5"], FIVE)
    ready_workers(pool, 2)
    pids = pool.worker_pids()
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 2
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert pool.worker_pids() == []
    with pytest.raises(RunError, match="closed before"):
        future.result(1)
    with pytest.raises(RunError, match="closed"):
        pool.submit(["5"], FIVE)
    pool.close()


def test_closing_while_libraries_are_imported_leaves_no_process() -> None:
    with RewardPool(BOXED, num_workers=2) as pool:
        future = pool.submit([r"\boxed{5}"], FIVE)
    with pytest.raises(RunError, match="closed before"):
        future.result(1)


def test_workers_that_cannot_start_fail_the_group_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with RewardPool(BOXED) as pool, pytest.raises(RunError, match="does not start"):
        pool.submit([r"\boxed{5}"], FIVE).result(60)


def test_an_interpreter_that_is_missing_fails_the_group_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with RewardPool(BOXED) as pool, pytest.raises(RunError, match=r"no reward worker: .*/no/such/python"):
        pool.submit([r"\boxed{5}"], FIVE).result(60)


def test_bad_sizes_and_unknown_rewards_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="num_workers is 0"):
        RewardPool(BOXED, num_workers=0)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        RewardPool(BOXED, timeout_s=0)
    with pytest.raises(ConfigError, match="slice_s is -1"):
        RewardPool(BOXED, slice_s=-1.0)
    with pytest.raises(ConfigError, match="unknown reward 'boxxed'"):
        RewardPool(RewardSpec(reward_type="boxxed"))


PARENT = r"""
import sys, time
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool
_, own, busy_s, then = sys.argv
pool = RewardPool(RewardSpec(reward_type=own), num_workers=2, timeout_s=600.0, slice_s=0.1)
pool.submit(["5"], Problem(ground_truth="5")).result()
pool.submit(["power", "sleep"], Problem(ground_truth="5"))
time.sleep(float(busy_s))
print(*pool.worker_pids(), flush=True)
if then == "wait":
    time.sleep(600)
"""


@pytest.mark.parametrize("busy_s", ["0", "2"], ids=["workers starting", "workers slow and idle"])
def test_a_parent_killed_with_sigkill_leaves_no_process(own: RewardSpec, busy_s: str) -> None:
    command = [sys.executable, "-c", PARENT, own.reward_type, busy_s, "wait"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        told = [int(pid) for pid in parent.stdout.readline().split()]
        pids = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
        parent.kill()
    assert set(told) <= set(pids)
    assert len(told) == 5 if busy_s == "2" else len(pids) >= 2  # a nursery, two slow and two idle workers
    wait_until(lambda: not any(is_running(pid) for pid in pids), timeout_s=10.0)


def test_a_parent_that_ends_without_closing_the_pool_leaves_no_process(own: RewardSpec) -> None:
    command = [sys.executable, "-c", PARENT, own.reward_type, "1", "exit"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 5
    wait_until(lambda: not any(is_running(pid) for pid in pids), timeout_s=10.0)
