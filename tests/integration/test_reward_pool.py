"""Test the reward pool with slow answers, killed workers and killed parents, all real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coati_rl.errors import ConfigError, RunError
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool
from rewards.workers import worker as workers
from tests.busy_cores import another_first_on_the_core_of, others_on_the_core_of
from tests.ended import has_ended
from tests.integration.reward_pools import FIVE, Own, ready_workers, wait_until

REPOSITORY = Path(__file__).parents[2]
BOXED = RewardSpec(reward_type="boxed")
LIMIT_S = 0.5
LATE = "timed out after 0.5 s"
SHORT_S = 0.2


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


@pytest.fixture(scope="module")
def own_of_module(tmp_path_factory: pytest.TempPathFactory) -> Own:
    return Own(tmp_path_factory.mktemp("own"))


@pytest.fixture
def own(own_of_module: Own) -> Own:
    own_of_module.forget()
    return own_of_module


@pytest.fixture(scope="module")
def two_workers(own_of_module: Own) -> Iterator[RewardPool]:
    with RewardPool(own_of_module.score, num_workers=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def one_worker(own_of_module: Own) -> Iterator[RewardPool]:
    with RewardPool(own_of_module.score, timeout_s=LIMIT_S) as pool:
        yield pool


def test_a_group_is_scored_in_the_order_of_its_responses(two_workers: RewardPool) -> None:
    future = two_workers.submit(["4", "5", "no number", "5", "-5"], FIVE)
    assert [score.verdict for score in future.result(60)] == ["wrong", "ok", "wrong", "ok", "wrong"]


def test_many_groups_are_in_flight_at_once_and_none_is_lost(two_workers: RewardPool) -> None:
    futures = [two_workers.submit([str(number), "x"], Problem(ground_truth=str(number))) for number in range(200)]
    assert {tuple(score.verdict for score in future.result(60)) for future in futures} == {("ok", "wrong")}


def test_an_empty_group_has_no_scores(two_workers: RewardPool) -> None:
    assert two_workers.submit([], FIVE).result(0) == []


def test_the_time_limit_holds_inside_one_instruction_and_costs_its_own_sample_only(one_worker: RewardPool) -> None:
    scores = one_worker.submit(["5", "power", "5", "6"], FIVE).result(60)
    assert [score.verdict for score in scores] == ["ok", "invalid", "ok", "wrong"]
    assert (scores[1].detail, scores[1].reward) == (LATE, 0.0)


def test_the_time_limit_counts_from_when_a_response_starts_to_run(one_worker: RewardPool, own: Own) -> None:
    scores = one_worker.submit(["sleep 600", "sleep 600", "sleep 0.1", "sleep 0.1"], FIVE).result(60)
    assert [score.detail for score in scores] == [LATE, LATE, "", ""]
    assert own.calls() == ["sleep 600", "sleep 600", "sleep 0.1", "sleep 0.1"]


@pytest.mark.full
def test_a_response_that_others_keep_from_the_cores_is_not_late(own: Own, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_MAX_STRETCH", 100)  # for a machine that is busy besides
    with RewardPool(own.score, timeout_s=LIMIT_S) as pool:
        (pid,) = ready_workers(pool)
        with others_on_the_core_of(pid, 25):
            started = time.monotonic()
            # With a 26th of a core: 0.78 s on the clock. What takes more than a fifth of the limit, 0.1 s, is late.
            (score,) = pool.submit(["compute 0.03"], FIVE).result(60)
            assert time.monotonic() - started > LIMIT_S
            (late,) = pool.submit(["compute 60"], FIVE).result(60)
    assert (score.verdict, score.detail) == ("wrong", "")
    assert (late.verdict, late.detail) == ("invalid", LATE)


def test_a_response_whose_worker_has_no_core_at_the_end_of_its_limit_is_not_late(
    own: Own, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel counts a wait when it ends; this one goes on."""
    monkeypatch.setattr(workers, "_MAX_STRETCH", 100)
    with RewardPool(own.score, timeout_s=SHORT_S) as pool:
        (pid,) = ready_workers(pool)
        with another_first_on_the_core_of(pid):
            submitted = pool.submit(["compute 0.015"], FIVE)
            time.sleep(5 * SHORT_S)
        (score,) = submitted.result(60)
    assert (score.verdict, score.detail) == ("wrong", "")


def test_samples_of_a_killed_worker_are_scored_again(one_worker: RewardPool, own: Own) -> None:
    (pid,) = ready_workers(one_worker)
    future = one_worker.submit(["5", "sleep 600", "6"], FIVE)
    own.wait_for("sleep 600")
    os.kill(pid, signal.SIGKILL)
    scores = future.result(60)
    assert [score.verdict for score in scores] == ["ok", "invalid", "wrong"]
    assert scores[1].detail == LATE  # its second attempt, not its first
    assert own.calls() == ["5", "sleep 600", "sleep 600", "6"]


def test_a_sample_whose_worker_dies_twice_is_invalid_and_the_others_are_scored(own: Own) -> None:
    with RewardPool(own.score, timeout_s=600.0) as pool:
        future = pool.submit(["5", "sleep 600", "6"], FIVE)
        for attempt in (1, 2):
            own.wait_for("sleep 600", attempt)
            os.kill(pool.worker_pids()[1], signal.SIGKILL)
        scores = future.result(60)
    assert [score.verdict for score in scores] == ["ok", "invalid", "wrong"]
    assert scores[1].detail == "its scoring process died 2 times"


def test_a_worker_killed_while_idle_is_replaced(one_worker: RewardPool) -> None:
    (pid,) = ready_workers(one_worker)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid))
    assert one_worker.submit(["5"], FIVE).result(60)[0].verdict == "ok"


def test_a_stopped_worker_costs_time_not_the_run(one_worker: RewardPool) -> None:
    (pid,) = ready_workers(one_worker)
    os.kill(pid, signal.SIGSTOP)
    long_responses = ["5" + " " * 400_000] * 3  # more than the socket holds
    assert [score.verdict for score in one_worker.submit(long_responses, FIVE).result(60)] == ["wrong"] * 3


def test_the_limit_holds_among_responses_that_a_socket_does_not_hold(one_worker: RewardPool) -> None:
    responses = ["5", "sleep 600", "5" * 900_000, "sleep 600", "5" * 900_000, "5"]
    futures = [one_worker.submit([response], FIVE) for response in responses]
    verdicts = [future.result(60)[0].verdict for future in futures]
    assert verdicts == ["ok", "invalid", "wrong", "invalid", "wrong", "ok"]


def test_groups_are_scored_in_the_order_of_their_submission(one_worker: RewardPool, own: Own) -> None:
    futures = [one_worker.submit([f"{number}a", f"{number}b"], FIVE) for number in range(20)]
    for future in futures:
        future.result(60)
    assert own.calls() == [f"{number}{letter}" for number in range(20) for letter in "ab"]


def test_what_is_left_of_a_chunk_is_scored_and_comes_before_later_groups(own: Own) -> None:
    with RewardPool(own.at_once, timeout_s=LIMIT_S) as pool:
        first = pool.submit(["5", "wait", "6", "5"], FIVE)  # one chunk: all four are begun at once
        second = pool.submit(["7"], FIVE)
        assert second.result(60)[0].verdict == "wrong"
        assert [score.verdict for score in first.result(0)] == ["ok", "invalid", "wrong", "ok"]
    assert own.calls() == ["5", "wait", "6", "5", "6", "5", "7"]


@pytest.mark.full
def test_a_tenth_of_endless_answers_costs_its_own_samples_only_and_there_are_never_more_processes(own: Own) -> None:
    with RewardPool(own.score, num_workers=2, timeout_s=LIMIT_S) as pool:
        most = 0
        futures = [pool.submit(["5", "sleep 600" if number % 10 == 5 else "6"], FIVE) for number in range(40)]
        while not all(future.done() for future in futures):
            most = max(most, len(pool.worker_pids()))
    details = [[score.detail for score in future.result(0)] for future in futures]
    assert details == [["", LATE if number % 10 == 5 else ""] for number in range(40)]
    assert most == 3


def test_a_batch_reward_has_one_call_and_one_time_limit_for_a_group(own: Own) -> None:
    with RewardPool(own.group, num_workers=2, timeout_s=1.0) as pool:
        assert [score.reward for score in pool.submit(["a", "b", "c"], FIVE).result(60)] == [3.0, 3.0, 3.0]
        assert own.calls() == ["['a', 'b', 'c']"]
        late = pool.submit(["sleep 0.6", "sleep 0.6", "a"], FIVE)
        good = pool.submit(["sleep 0.6", "a"], FIVE)
        assert [score.detail for score in late.result(60)] == ["timed out after 1 s"] * 3
        assert [score.reward for score in good.result(60)] == [2.0, 2.0]


@pytest.mark.full
def test_a_batch_call_whose_process_dies_is_made_twice(own: Own) -> None:
    with RewardPool(own.group) as pool:
        scores = pool.submit(["a", "die"], FIVE).result(60)
        assert [(score.verdict, score.detail) for score in scores] == [
            ("invalid", "its scoring process died 2 times")
        ] * 2
        assert pool.submit(["a"], FIVE).result(60)[0].reward == 1.0
    assert own.calls() == ["['a', 'die']", "['a', 'die']", "['a']"]


def test_closing_leaves_no_process_and_fails_what_is_unfinished(own: Own) -> None:
    pool = RewardPool(own.score, num_workers=2, timeout_s=600.0)
    future = pool.submit(["power", "5"], FIVE)
    ready_workers(pool, 2)
    own.wait_for("power")
    pids = pool.worker_pids()
    pool.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert pool.worker_pids() == []
    with pytest.raises(RunError, match="closed before"):
        future.result(0)
    with pytest.raises(RunError, match="closed"):
        pool.submit(["5"], FIVE)
    pool.close()


def test_closing_while_libraries_are_imported_leaves_no_process() -> None:
    with RewardPool(BOXED, num_workers=2) as pool:
        future = pool.submit([r"\boxed{5}"], FIVE)
    with pytest.raises(RunError, match="closed before"):
        future.result(0)


def test_bad_sizes_and_unknown_rewards_are_refused_before_a_process_starts() -> None:
    with pytest.raises(ConfigError, match="num_workers is 0"):
        RewardPool(BOXED, num_workers=0)
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        RewardPool(BOXED, timeout_s=0)
    with pytest.raises(ConfigError, match="unknown reward 'boxxed'"):
        RewardPool(RewardSpec(reward_type="boxxed"))


PARENT = r"""
import sys, time
from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool
from rewards.workers import worker as workers
_, own, state, then = sys.argv
pool = RewardPool(RewardSpec(reward_type=own), num_workers=2, timeout_s=600.0)
pool.submit(["power", "sleep 600"], Problem(ground_truth="5"))
while len(pool.worker_pids()) < (3 if state == "busy" else 1):
    time.sleep(0.01)
print(*pool.worker_pids(), flush=True)
if then == "wait":
    time.sleep(600)
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("state", ["starting", "busy"])
def test_a_parent_killed_with_sigkill_leaves_no_process(own: Own, state: str) -> None:
    command = [sys.executable, "-c", PARENT, own.score.reward_type, state, "wait"]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        told = [int(pid) for pid in parent.stdout.readline().split()]
        if state == "busy":
            own.wait_for("power")
            own.wait_for("sleep 600")
        pids = [process.pid for process in psutil.Process(parent.pid).children(recursive=True)]
        parent.kill()
    assert set(told) <= set(pids)
    assert len(told) == 3 or state == "starting"
    wait_until(lambda: all(has_ended(pid) for pid in pids))


@pytest.mark.full
def test_a_parent_that_ends_without_closing_the_pool_leaves_no_process(own: Own) -> None:
    command = [sys.executable, "-c", PARENT, own.score.reward_type, "busy", "exit"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    wait_until(lambda: all(has_ended(pid) for pid in pids))
