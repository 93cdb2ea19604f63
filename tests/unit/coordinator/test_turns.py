"""Test whose turn it is on shared devices: who waits for whom, and what becomes of lost and late producers."""

from coati_rl.coordinator.membership import UNSYNCED
from coati_rl.work import FinishWork, HandOverWork, SaveWork, SyncWork, TrainWork
from tests.unit.coordinator.coordinator_calls import (
    finish_leases,
    lease_all,
    report_commit,
    report_staged,
    report_step,
    report_sync,
    work,
)


def refusal(coordinator, producer=0):
    return coordinator.lease(producer, max_prompts=1, timeout_s=0).reason


def start(make_coordinator, *, num_producers=1, **changes):
    """A coordinator whose producers have their first weights: (it, the number of the next item)."""
    coordinator = make_coordinator(takes_turns=True, **changes)
    for producer in range(num_producers):
        coordinator.add_producer(producer, version=UNSYNCED)
    assert work(coordinator, 0) == HandOverWork(to="trainers", members=tuple(range(num_producers)))
    report_sync(coordinator, work(coordinator, 1))
    assert work(coordinator, 2).to == "producers"
    return coordinator, 3


def train(coordinator, index, steps):
    for number in range(index, index + steps):
        item = work(coordinator, number)
        assert isinstance(item, TrainWork)
        report_step(coordinator, item.batch.step)
    return index + steps


def test_trainers_wait_for_the_whole_rollout_step_and_no_prompt_is_drawn_twice(make_coordinator, make_group):
    coordinator, index = start(make_coordinator)
    leases = lease_all(coordinator)
    assert len(leases) == 4, "a rollout step"
    finish_leases(coordinator, make_group, leases[:3])
    assert work(coordinator, index) is None, "a mini-batch of two is there"
    told = "the producers have the devices: 3 of 4 groups of the rollout step are finished, 1 prompt is being sampled"
    assert told in coordinator.status().text
    finish_leases(coordinator, make_group, leases[3:])
    assert work(coordinator, index).to == "trainers"


def test_no_prompt_is_leased_while_the_trainers_have_the_devices(make_coordinator, make_group):
    coordinator, index = start(make_coordinator)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    assert work(coordinator, index).to == "trainers"
    assert refusal(coordinator) == "the trainers have the devices"
    index = train(coordinator, index + 1, 2)
    sync = work(coordinator, index)
    assert isinstance(sync, SyncWork)
    report_staged(coordinator, sync)
    assert refusal(coordinator) != "", "its weights are staged, and the devices are not its own"
    assert work(coordinator, index + 1).to == "producers"
    assert len(lease_all(coordinator)) == 0, "it has to commit first"
    report_commit(coordinator, 0, 2)
    assert len(lease_all(coordinator)) == 4


def test_the_producers_turn_lasts_until_they_have_committed(make_coordinator, make_group):
    coordinator, index = start(make_coordinator)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    assert work(coordinator, index).to == "trainers"
    index = train(coordinator, index + 1, 2)
    report_staged(coordinator, work(coordinator, index))
    assert work(coordinator, index + 1).to == "producers"
    assert work(coordinator, index + 2) is None
    assert "waiting for producer 0 to commit version 2, in the producers' turn" in coordinator.status().text


def test_a_producer_that_is_lost_alone_has_its_replacement_synced_at_once(make_coordinator, make_group):
    coordinator, index = start(make_coordinator)
    first, *others = lease_all(coordinator)
    finish_leases(coordinator, make_group, others)  # a mini-batch that is not trained before its rollout step
    coordinator.remove_producer(0, "it died")
    assert work(coordinator, index) is None, "there is nobody to hand the devices over from"
    coordinator.add_producer(1, version=UNSYNCED)
    assert work(coordinator, index) == HandOverWork(to="trainers", members=(1,))
    sync = work(coordinator, index + 1)
    assert (sync.members, sync.policy_version) == ((1,), 0)
    report_sync(coordinator, sync)
    assert work(coordinator, index + 2).to == "producers"
    assert first.prompt in [lease.prompt for lease in lease_all(coordinator, 1)]


def test_a_late_producer_gets_weights_with_the_others_when_the_turn_ends(make_coordinator, make_group):
    coordinator, index = start(make_coordinator, num_producers=2)
    leases = lease_all(coordinator, 0)
    coordinator.remove_producer(1, "it died")
    coordinator.add_producer(2, version=UNSYNCED)
    assert work(coordinator, index) is None, "producer 0 goes on"
    assert refusal(coordinator, 2) == "it has not received version 0 yet"
    finish_leases(coordinator, make_group, leases)
    assert work(coordinator, index) == HandOverWork(to="trainers", members=(0, 2))
    index = train(coordinator, index + 1, 2)  # a sync before would have to be committed in this turn
    sync = work(coordinator, index)
    assert (sync.members, sync.policy_version) == ((0, 2), 2)


def test_an_interrupt_takes_the_devices_from_the_producers_for_the_checkpoint(make_coordinator, make_group):
    coordinator, index = start(make_coordinator, num_prompts=8)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    assert work(coordinator, index).to == "trainers"
    index = train(coordinator, index + 1, 2)
    report_sync(coordinator, work(coordinator, index))
    assert work(coordinator, index + 1).to == "producers"
    assert len(lease_all(coordinator)) == 4
    coordinator.stop()
    kinds = [work(coordinator, index + number) for number in (2, 3, 4)]
    assert [type(item) for item in kinds] == [HandOverWork, SaveWork, FinishWork]


def test_evaluations_are_answered_before_the_trainers_go_on(make_coordinator, make_group):
    coordinator, index = start(make_coordinator, eval_prompts=2, eval_interval=2)
    leases = lease_all(coordinator)
    evaluation = [lease for lease in leases if lease.prompt.purpose == "eval"]
    assert len(evaluation) == 2
    finish_leases(coordinator, make_group, [lease for lease in leases if lease not in evaluation])
    assert work(coordinator, index) is None
    finish_leases(coordinator, make_group, evaluation)
    assert work(coordinator, index).to == "trainers"
