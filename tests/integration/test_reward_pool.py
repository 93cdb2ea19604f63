"""The reward pool under poisonous answers, killed workers and killed parents. Real processes, nothing replaced."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError, RunError
from rewards import RewardPool
from rewards.pool import WorkerProcess

REPOSITORY = Path(__file__).parents[2]
HUGE_POWER = r"\boxed{9^{9^{9^9}}}"  # hours inside one big-integer multiplication, deaf to signals
NESTED_GROUPS = r"\boxed{" + "{" * 2000 + "5" + "}" * 2000 + "}"  # about 10 s in the parser


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


def busy_worker(pool: RewardPool) -> WorkerProcess:
    """The only worker of a pool, once it is at work on what was submitted."""
    wait_until(lambda: any(worker._is_ready for worker in pool._workers.values()))
    time.sleep(0.2)
    return next(iter(pool._workers.values()))


def test_a_group_is_scored_in_the_order_of_its_responses() -> None:
    with RewardPool("boxed", num_workers=2) as pool:
        future = pool.submit([r"\boxed{4}", r"\boxed{5}", "no box", r"\boxed{5.0}", r"\boxed{-5}"], "5")
        assert [score.verdict for score in future.result(60)] == ["wrong", "ok", "wrong", "ok", "wrong"]


def test_many_groups_are_in_flight_at_once_and_none_is_lost() -> None:
    with RewardPool("boxed", num_workers=2) as pool:
        futures = [pool.submit([rf"\boxed{{{number}}}", r"\boxed{x}"], str(number)) for number in range(200)]
        verdicts = {tuple(score.verdict for score in future.result(60)) for future in futures}
    assert verdicts == {("ok", "wrong")}


def test_an_empty_group_has_no_scores() -> None:
    with RewardPool("boxed") as pool:
        assert pool.submit([], "5").result(1) == []


@pytest.mark.parametrize("poison", [HUGE_POWER, NESTED_GROUPS], ids=["huge power", "nested groups"])
def test_a_poisonous_answer_costs_its_own_sample_only(poison: str) -> None:
    with RewardPool("boxed", timeout_s=2.0) as pool:
        started = time.monotonic()
        scores = pool.submit([r"\boxed{5}", poison, r"\boxed{5}", r"\boxed{6}"], "5").result(60)
        elapsed_s = time.monotonic() - started
    assert [score.verdict for score in scores] == ["ok", "invalid", "ok", "wrong"]
    assert scores[1].detail == "timed out after 2 s"
    assert elapsed_s < 20  # 2 s and two starts of a worker


def test_a_poisonous_answer_holds_up_one_worker_only() -> None:
    with RewardPool("boxed", num_workers=2, timeout_s=10.0) as pool:
        pool.submit([r"\boxed{5}", r"\boxed{5}"], "5").result(60)
        poisoned = pool.submit([HUGE_POWER], "5")
        clean = [pool.submit([r"\boxed{5}"], "5") for _ in range(10)]
        assert all(future.result(8)[0].verdict == "ok" for future in clean)
        assert not poisoned.done()


def test_samples_of_a_killed_worker_are_scored_again() -> None:
    with RewardPool("boxed", timeout_s=3.0) as pool:
        future = pool.submit([r"\boxed{5}", HUGE_POWER, r"\boxed{6}"], "5")
        busy_worker(pool).kill()
        scores = future.result(60)
    assert [score.verdict for score in scores] == ["ok", "invalid", "wrong"]
    assert scores[1].detail == "timed out after 3 s"  # its second attempt, not its first


def test_a_sample_whose_worker_dies_twice_is_invalid_and_the_others_are_scored() -> None:
    with RewardPool("boxed", timeout_s=60.0) as pool:
        future = pool.submit([r"\boxed{5}", HUGE_POWER, r"\boxed{6}"], "5")
        first = busy_worker(pool)
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: bool(pool.worker_pids()) and pool.worker_pids() != [first.pid])
        os.kill(busy_worker(pool).pid, signal.SIGKILL)
        scores = future.result(60)
    assert [score.verdict for score in scores] == ["ok", "invalid", "wrong"]
    assert scores[1].detail == "its scoring process died 2 times"


def test_a_worker_killed_while_idle_is_replaced() -> None:
    with RewardPool("boxed") as pool:
        pool.submit([r"\boxed{5}"], "5").result(60)
        (pid,) = pool.worker_pids()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not is_running(pid))
        assert pool.submit([r"\boxed{5}"], "5").result(60)[0].verdict == "ok"


def test_a_stopped_worker_costs_the_time_limit_not_the_run() -> None:
    with RewardPool("boxed", timeout_s=1.0) as pool:
        pool.submit([r"\boxed{5}"], "5").result(60)
        os.kill(pool.worker_pids()[0], signal.SIGSTOP)
        long_responses = [r"\boxed{5}" + " " * 400_000] * 3  # more than the socket holds
        scores = pool.submit(long_responses, "5").result(60)
    assert [score.verdict for score in scores] == ["ok", "ok", "ok"]


def test_an_interrupt_from_the_keyboard_does_not_reach_the_workers() -> None:
    with RewardPool("boxed") as pool:
        wait_until(lambda: bool(pool.worker_pids()))
        os.kill(pool.worker_pids()[0], signal.SIGINT)  # while it imports
        future = pool.submit([r"\boxed{5}"], "5")
        busy_pid = pool.worker_pids()[0]
        os.kill(busy_pid, signal.SIGINT)
        assert future.result(60)[0].verdict == "ok"
        assert pool.worker_pids() == [busy_pid]


def test_closing_leaves_no_process_and_fails_what_is_unfinished() -> None:
    pool = RewardPool("boxed", num_workers=2, timeout_s=60.0)
    future = pool.submit([HUGE_POWER, r"\boxed{5}"], "5")
    wait_until(lambda: len(pool.worker_pids()) == 2)
    pids = pool.worker_pids()
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5
    assert not any(is_running(pid) for pid in pids)
    with pytest.raises(RunError, match="closed before"):
        future.result(1)
    with pytest.raises(RunError, match="closed"):
        pool.submit([r"\boxed{5}"], "5")
    pool.close()


def test_workers_that_cannot_start_fail_the_group_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with RewardPool("boxed") as pool, pytest.raises(RunError, match="does not start"):
        pool.submit([r"\boxed{5}"], "5").result(60)


def test_an_interpreter_that_is_missing_fails_the_group_instead_of_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with RewardPool("boxed") as pool, pytest.raises(RunError, match="no reward worker"):
        pool.submit([r"\boxed{5}"], "5").result(60)


def test_bad_sizes_and_unknown_rewards_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="num_workers is 0"):
        RewardPool("boxed", num_workers=0)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        RewardPool("boxed", timeout_s=0)
    with pytest.raises(ConfigError, match="not available yet"):
        RewardPool("code")


PARENT = r"""
import sys, time
from rewards import RewardPool
pool = RewardPool("boxed", num_workers=2, timeout_s=600.0)
pool.submit(["\\boxed{5}"], "5").result()
pool.submit(["\\boxed{9^{9^{9^9}}}", "\\boxed{9^{9^{9^9}}}"], "5")
time.sleep(float(sys.argv[1]))
print(*pool.worker_pids(), flush=True)
if sys.argv[2] == "wait":
    time.sleep(600)
"""


@pytest.mark.parametrize("busy_s", ["0", "2"], ids=["workers starting", "workers busy"])
def test_a_parent_killed_with_sigkill_leaves_no_process(busy_s: str) -> None:
    command = [sys.executable, "-c", PARENT, busy_s, "wait"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids), timeout_s=10.0)


def test_a_parent_that_ends_without_closing_the_pool_leaves_no_process() -> None:
    command = [sys.executable, "-c", PARENT, "1", "exit"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    wait_until(lambda: not any(is_running(pid) for pid in pids), timeout_s=10.0)
