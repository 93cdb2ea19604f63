"""The two lanes of the reward pool: what is slow holds up nothing else, loses no work, and has its full time."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards import RewardPool

FIVE = Problem(ground_truth="5")
# "compute 1.5" takes 1.5 s of a core, "sleep 1.5" as much of the clock. Each call leaves a line in the file `calls`.
OWN = """
import os, pathlib, time

def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

def score(response, ground_truth):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
        calls.write(response + "\\n")
    if response.startswith("sleep"):
        time.sleep(float(response.split()[1]))
        return 1.0
    if response.startswith("compute"):
        compute(float(response.split()[1]))
        return 1.0
    if response == "niceness":
        compute(0.4)
        return os.getpriority(os.PRIO_PROCESS, 0)
    return float(response == ground_truth)

def score_group(queries, prompts, labels):
    with open(pathlib.Path(__file__).with_name("calls"), "a") as calls:
        calls.write(f"{queries}\\n")
    for query in queries:
        if query.startswith("sleep"):
            time.sleep(float(query.split()[1]))
        if query == "die":
            os._exit(1)
    return [float(len(queries)) for _ in queries]
"""


@pytest.fixture
def own(tmp_path: Path) -> RewardSpec:
    (tmp_path / "own.py").write_text(OWN)
    return RewardSpec(reward_type=f"{tmp_path}/own.py:score")


@pytest.fixture
def own_batch(own: RewardSpec) -> RewardSpec:
    return RewardSpec(reward_type=f"{own.reward_type}_group")


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    before = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - before == set()


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def start(pool: RewardPool) -> None:
    pool.submit(["5"], FIVE).result(60)


@pytest.mark.parametrize("slow_response", ["compute 600", "sleep 600"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_as_many_slow_responses_as_workers_hold_up_no_other(
    own: RewardSpec, num_workers: int, slow_response: str
) -> None:
    with RewardPool(own, num_workers=num_workers, timeout_s=600.0, slice_s=0.1) as pool:
        start(pool)
        slow = pool.submit([slow_response] * num_workers, FIVE)
        started = time.monotonic()
        clean = [pool.submit(["5", "6"], FIVE) for _ in range(20)]
        assert all([score.verdict for score in future.result(30)] == ["ok", "wrong"] for future in clean)
        assert time.monotonic() - started < 3
        assert not slow.done()


def test_more_slow_responses_than_the_slow_lane_holds_hold_up_no_other_either(own: RewardSpec) -> None:
    with RewardPool(own, num_workers=1, timeout_s=600.0, slice_s=0.1) as pool:
        start(pool)
        slow = pool.submit(["compute 600"] * 8, FIVE)
        started = time.monotonic()
        assert pool.submit(["5"], FIVE).result(30)[0].verdict == "ok"
        assert time.monotonic() - started < 5  # eight slices of 0.1 s, beside one that goes on, and new processes
        assert not slow.done()


def test_a_response_that_overruns_its_slice_goes_on_where_it_is(own: RewardSpec, tmp_path: Path) -> None:
    with RewardPool(own, timeout_s=30.0, slice_s=0.2) as pool:
        start(pool)
        started = time.monotonic()
        scores = pool.submit(["compute 0.6", "5"], FIVE).result(60)
        elapsed_s = time.monotonic() - started
    assert [score.verdict for score in scores] == ["ok", "ok"]
    assert calls(tmp_path).count("compute 0.6") == 1
    assert elapsed_s < 3


def test_a_response_that_only_waits_for_a_core_is_not_taken_for_a_slow_one(own: RewardSpec) -> None:
    with RewardPool(own, slice_s=0.2) as pool:
        start(pool)
        pids = pool.worker_pids()
        assert pool.submit(["sleep 0.5", "sleep 0.5"], FIVE).result(60)[1].verdict == "ok"
        assert pool.worker_pids() == pids


def test_a_response_for_which_the_slow_lane_has_no_room_waits_and_has_its_full_time(
    own: RewardSpec, tmp_path: Path
) -> None:
    with RewardPool(own, timeout_s=2.0, slice_s=0.1) as pool:
        start(pool)
        scores = pool.submit(["sleep 600", "sleep 1.2", "5"], FIVE).result(60)  # slices of 0.5 s, for who sleeps
    assert [score.detail for score in scores] == ["timed out after 2 s", "", ""]
    assert [score.verdict for score in scores] == ["invalid", "ok", "ok"]
    # The second was begun, made way for the third, and was scored from the start when the first was over.
    assert calls(tmp_path) == ["5", "sleep 600", "sleep 1.2", "5", "sleep 1.2"]


def test_what_is_left_of_a_chunk_comes_before_later_groups(own: RewardSpec, tmp_path: Path) -> None:
    with RewardPool(own, timeout_s=1.0, slice_s=0.1) as pool:
        start(pool)
        first = pool.submit(["a", "sleep 600", "b", "c"], FIVE)
        second = pool.submit(["d", "e"], FIVE)
        second.result(60)
        assert not first.done()
        assert calls(tmp_path) == ["5", "a", "sleep 600", "b", "c", "d", "e"]


def test_the_limit_holds_among_responses_that_a_socket_does_not_hold(own: RewardSpec) -> None:
    with RewardPool(own, timeout_s=2.0, slice_s=0.1) as pool:  # all wait for the start, and could be asked for at once
        responses = ["5", "sleep 600", "5" * 900_000, "sleep 600", "5" * 900_000, "5"]
        futures = [pool.submit([response], FIVE) for response in responses]
        verdicts = [future.result(30)[0].verdict for future in futures]
    assert verdicts == ["ok", "invalid", "wrong", "invalid", "wrong", "ok"]


def test_groups_are_scored_in_the_order_of_their_submission(own: RewardSpec, tmp_path: Path) -> None:
    with RewardPool(own, slice_s=0.1) as pool:
        futures = [pool.submit([f"{number}a", f"{number}b"], FIVE) for number in range(20)]
        for future in futures:
            future.result(60)
    assert calls(tmp_path) == [f"{number}{letter}" for number in range(20) for letter in "ab"]


def test_there_are_never_more_processes_than_both_lanes_hold(own: RewardSpec) -> None:
    with RewardPool(own, num_workers=2, timeout_s=0.5, slice_s=0.05) as pool:
        future = pool.submit(["sleep 600", "5"] * 10, FIVE)
        most = 0
        while not future.done():
            most = max(most, len(pool.worker_pids()))
            time.sleep(0.005)
    assert most == 5  # the nursery, two fast workers, two slow ones


def test_a_slow_response_lets_others_go_first(own: RewardSpec) -> None:
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    with RewardPool(own, timeout_s=10.0, slice_s=0.1) as demoted, RewardPool(own, timeout_s=10.0) as fast:
        assert demoted.submit(["niceness"], FIVE).result(60)[0].reward == ours + 5
        assert fast.submit(["niceness"], FIVE).result(60)[0].reward == ours


def test_without_a_slice_a_response_has_its_time_in_the_fast_lane(own: RewardSpec, tmp_path: Path) -> None:
    with RewardPool(own, num_workers=1, timeout_s=1.0) as pool:
        start(pool)
        pids = pool.worker_pids()
        assert pool.submit(["sleep 0.5", "5"], FIVE).result(60)[0].verdict == "ok"
        assert pool.worker_pids() == pids
        assert pool.submit(["sleep 600", "5"], FIVE).result(60)[0].detail == "timed out after 1 s"
        assert len(pool.worker_pids()) <= 2
    assert calls(tmp_path) == ["5", "sleep 0.5", "5", "sleep 600", "5"]


def test_a_response_that_kills_its_process_in_the_slow_lane_is_scored_twice(own: RewardSpec, tmp_path: Path) -> None:
    with RewardPool(own, timeout_s=30.0, slice_s=0.1) as pool:
        start(pool)
        future = pool.submit(["sleep 600", "5"], FIVE)
        for attempt in (2, 3):
            while len(calls(tmp_path)) < attempt + (attempt == 3) or len(pool.worker_pids()) < 3:
                time.sleep(0.02)
            time.sleep(0.8)
            slow = [pid for pid in pool.worker_pids()[1:] if os.getpriority(os.PRIO_PROCESS, pid) > 0]
            assert len(slow) == 1
            os.kill(slow[0], 9)
        scores = future.result(60)
    assert [score.detail for score in scores] == ["its scoring process died 2 times", ""]
    assert sorted(calls(tmp_path)) == ["5", "5", "sleep 600", "sleep 600"]


def test_200_groups_with_a_tenth_of_poison_keep_all_limits(own: RewardSpec) -> None:
    with RewardPool(own, num_workers=2, timeout_s=0.5, slice_s=0.05) as pool:
        start(pool)
        started = time.monotonic()
        latencies_s: list[float] = []

        def submit_clean() -> None:
            begun = time.monotonic()
            future = pool.submit(["5", "6"], FIVE)
            future.add_done_callback(lambda _: latencies_s.append(time.monotonic() - begun))

        poisoned = []
        for number in range(200):
            if number % 10 == 5:
                poisoned.append(pool.submit(["5", "compute 600"], FIVE))
            else:
                submit_clean()
            time.sleep(0.005)
        details = [[score.detail for score in future.result(60)] for future in poisoned]
        elapsed_s = time.monotonic() - started
    assert details == [["", "timed out after 0.5 s"]] * 20
    assert len(latencies_s) == 180
    assert sorted(latencies_s)[178] < 2  # p99
    assert elapsed_s < 1 + 20 * 0.5 / 2 + 3  # submitting, poison x limit / workers, and forks on a busy machine


def test_a_batch_reward_sees_the_whole_group_in_one_call(own_batch: RewardSpec, tmp_path: Path) -> None:
    with RewardPool(own_batch, num_workers=2) as pool:
        scores = pool.submit(["a", "b", "c"], FIVE).result(60)
    assert [score.reward for score in scores] == [3.0, 3.0, 3.0]
    assert calls(tmp_path) == ["['a', 'b', 'c']"]


def test_a_batch_call_has_one_time_limit_and_all_its_responses_fail_together(own_batch: RewardSpec) -> None:
    with RewardPool(own_batch, timeout_s=1.0) as pool:
        late = pool.submit(["sleep 0.7", "sleep 0.7", "a"], FIVE)
        good = pool.submit(["sleep 0.7", "a"], FIVE)
        assert [score.detail for score in late.result(60)] == ["timed out after 1 s"] * 3
        assert [score.reward for score in good.result(60)] == [2.0, 2.0]


def test_a_batch_call_whose_process_dies_is_made_twice(own_batch: RewardSpec, tmp_path: Path) -> None:
    with RewardPool(own_batch) as pool:
        scores = pool.submit(["a", "die"], FIVE).result(60)
        assert [score.verdict for score in scores] == ["invalid", "invalid"]
        assert [score.detail for score in scores] == ["its scoring process died 2 times"] * 2
        assert pool.submit(["a"], FIVE).result(60)[0].reward == 1.0
    assert calls(tmp_path) == ["['a', 'die']", "['a', 'die']", "['a']"]


def test_a_batch_call_that_overruns_its_slice_goes_on_in_the_slow_lane(own_batch: RewardSpec, tmp_path: Path) -> None:
    with RewardPool(own_batch, timeout_s=30.0, slice_s=0.1) as pool:
        slow = pool.submit(["sleep 0.8", "a"], FIVE)
        assert [score.reward for score in slow.result(60)] == [2.0, 2.0]
    assert calls(tmp_path) == ["['sleep 0.8', 'a']"]
