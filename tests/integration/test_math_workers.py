"""Test that limits of math answers in workers are CPU time and memory, independent of the machine's load."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import psutil
import pytest

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool
from rewards.workers import worker as workers
from tests.integration.reward_pools import ready_workers, wait_until

BOXED = RewardSpec(reward_type="boxed", math_answer="any")
FIVE = Problem(ground_truth="5")
RIGHT = r"\boxed{\frac{10}{2}}"
LIMIT_S = 0.3


def test_a_worker_that_is_kept_from_the_cores_for_longer_than_its_limit_is_not_late() -> None:
    with RewardPool(BOXED, timeout_s=LIMIT_S) as pool:
        (pid,) = ready_workers(pool)
        os.kill(pid, signal.SIGSTOP)
        future = pool.submit([RIGHT, r"\boxed{4}"], FIVE)
        time.sleep(4 * LIMIT_S)
        assert not future.done()
        os.kill(pid, signal.SIGCONT)
        assert [score.verdict for score in future.result(60)] == ["ok", "wrong"]
        assert ready_workers(pool) == [pid], "it was not replaced"


@contextmanager
def starved(pid: int) -> Iterator[None]:
    """Let a process run for a fifth of the time, as a machine with five times as much to do would."""
    is_over = Event()

    def stop_and_go() -> None:
        while True:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.16)
            os.kill(pid, signal.SIGCONT)
            if is_over.wait(0.04):
                return

    thread = Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.mark.full
def test_the_verdict_of_an_answer_that_takes_long_is_the_same_on_a_starved_worker() -> None:
    slow, problem = r"\boxed{(x+1)^{60}}", Problem(ground_truth=r"(x+1)^{59} \cdot (x+1)")
    with RewardPool(BOXED, timeout_s=60.0) as pool:
        process = psutil.Process(*ready_workers(pool))
        before = sum(process.cpu_times()[:2])
        (undisturbed,) = pool.submit([slow], problem).result(60)
        cpu_s = sum(process.cpu_times()[:2]) - before
    with RewardPool(BOXED, timeout_s=2 * cpu_s) as pool:
        (pid,) = ready_workers(pool)
        with starved(pid):
            started = time.monotonic()
            (score,) = pool.submit([slow], problem).result(60)
            assert time.monotonic() - started > 2 * cpu_s, "it took longer than its limit on the clock"
    assert score == undisturbed
    assert score.verdict == "ok"


@pytest.mark.full
def test_an_answer_without_an_end_has_its_limit_of_cpu_time() -> None:
    with RewardPool(BOXED, timeout_s=LIMIT_S) as pool:
        ready_workers(pool)
        (score,) = pool.submit([r"\boxed{20!!}"], FIVE).result(60)
    assert (score.verdict, score.detail) == ("invalid", "timed out after 0.3 s of CPU time")


@pytest.mark.full
def test_a_worker_that_never_runs_is_replaced_and_its_response_scored_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(workers, "_MAX_CPU_STRETCH", 3)
    with RewardPool(BOXED, timeout_s=LIMIT_S) as pool:
        (first,) = ready_workers(pool)
        os.kill(first, signal.SIGSTOP)
        assert pool.submit([RIGHT], FIVE).result(60)[0].verdict == "ok"
        (second,) = ready_workers(pool)
        assert second != first


@pytest.mark.full
def test_a_response_over_which_two_workers_stand_still_is_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_MAX_CPU_STRETCH", 3)
    with RewardPool(BOXED, timeout_s=LIMIT_S) as pool:
        stopped: list[int] = []

        def stop_the_next() -> bool:
            new = [pid for pid in pool.worker_pids()[1:] if pid not in stopped]
            for pid in new:
                os.kill(pid, signal.SIGSTOP)
            stopped.extend(new)
            return len(stopped) == 2

        wait_until(lambda: stop_the_next() or len(stopped) == 1)
        future = pool.submit([r"\boxed{20!!}"], FIVE)  # so long that the second is stopped before it has an answer
        wait_until(stop_the_next)
        (score,) = future.result(60)
    assert (score.verdict, score.detail) == ("invalid", "its scoring process died 2 times (it did not run)")


def test_an_answer_that_needs_too_much_memory_is_invalid_and_costs_itself_only() -> None:
    with RewardPool(BOXED, timeout_s=60.0) as pool:
        large, right = pool.submit([r"\boxed{(1+\sqrt{2})^{1000000}}", RIGHT], FIVE).result(120)
        assert (large.verdict, right.verdict) == ("invalid", "ok")
        assert large.detail == "took more than 128 MiB of memory"
