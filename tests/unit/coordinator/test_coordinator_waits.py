"""Test that calls which wait are woken by what concerns them, and by nothing else: hundreds of them may wait."""

import threading
import time

import pytest

from coati_rl.coordinator.lease_waits import LeaseWaits
from coati_rl.coordinator.scheduler import Scheduler
from coati_rl.work import TrainWork, Wait
from tests.unit.coordinator.coordinator_calls import lease_all
from tests.unit.coordinator.test_coordinator_lock import SOON_S, calling

TWO_RANKS = {"dp": 2, "train_batch_size": 1, "train_minibatch_size": 1}


@pytest.fixture
def count_calls(monkeypatch):
    """(class, method) -> the arguments of each call so far."""

    def count(cls, name):
        calls, honest = [], getattr(cls, name)

        def counted(self, *args, **options):
            calls.append(args)
            return honest(self, *args, **options)

        monkeypatch.setattr(cls, name, counted)
        return calls

    return count


def wait_until(is_true):
    deadline = time.monotonic() + SOON_S
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def put(coordinator, lease, make_group, **changes):
    assert coordinator.put(0, [make_group(lease, **changes)]) == 1


def test_a_group_wakes_no_producer_unless_it_frees_a_slot(make_coordinator, make_group, count_calls):
    coordinator = make_coordinator(num_prompts=16)
    for producer in (0, 1):
        coordinator.add_producer(producer, version=0)
    kept, dropped = lease_all(coordinator)[:2]
    notified = count_calls(LeaseWaits, "notify")
    with calling(lambda: coordinator.lease(1, max_prompts=1, timeout_s=SOON_S)) as replies:
        wait_until(lambda: coordinator._state.lease_waits._waiting)
        put(coordinator, kept, make_group)
        assert notified == [((),)], "the group takes a slot"
        put(coordinator, dropped, make_group, verdict="invalid")
    assert len(replies[0].leases) == 1
    assert notified[1] == (None,)


def test_one_rank_decides_and_the_next_one_does_when_it_has_its_answer(make_coordinator, make_group, count_calls):
    coordinator = make_coordinator(num_prompts=8, **TWO_RANKS)
    coordinator.add_producer(0, version=0)
    first, second, *_ = lease_all(coordinator)
    decisions = count_calls(Scheduler, "decide")
    items = {}

    def ask(rank, timeout_s):
        items[rank] = coordinator.next_work(0, rank=rank, timeout_s=timeout_s)

    leaves_soon = threading.Thread(target=ask, args=(0, 0.5))
    leaves_soon.start()
    wait_until(lambda: coordinator._decider == 0)
    with calling(lambda: ask(1, SOON_S)):
        put(coordinator, first, make_group)
        leaves_soon.join(SOON_S)
        assert isinstance(items[0], Wait) and "1 of 2 groups of step 1 are finished" in items[0].reason
        wait_until(lambda: coordinator._decider == 1)
        before = len(decisions)
        put(coordinator, second, make_group)
    assert isinstance(items[1], TrainWork)
    assert before == 3, "when rank 0 asked, with the group, and when rank 1 took its place"
