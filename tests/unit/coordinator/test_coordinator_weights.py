"""Test weight syncs of the coordinator: when they are due, which producers get prompts meanwhile, staleness."""

import random

import numpy as np
import pytest

from coati_rl.errors import RunError
from coati_rl.work import FinishWork, ProbeReport, SyncWork, TrainWork
from tests.unit.coordinator.coordinator_calls import (
    PROBE,
    drive,
    events,
    events_of_end,
    finish_leases,
    lease_all,
    report_commit,
    report_staged,
    report_step,
    report_sync,
    work,
)


def test_weights_sync_every_k_optimizer_steps_and_the_last_weights_go_out_too(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=6)  # 3 steps: one rollout step of 2, then half of one
    coordinator.add_producer(0, version=0)
    kinds = [type(item).__name__ for item in drive(coordinator, make_group)]
    assert kinds == ["TrainWork", "TrainWork", "SyncWork", "TrainWork", "SyncWork", "SaveWork", "FinishWork"]


@pytest.mark.full
def test_identities_of_weights_that_no_rollout_can_have_any_more_are_forgotten(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=600, n_behind=1)
    coordinator.add_producer(0, version=0)
    index = version = 0
    while not isinstance(item := work(coordinator, index), FinishWork):
        finish_leases(coordinator, make_group, lease_all(coordinator), version=version)
        index += item is not None
        if isinstance(item, TrainWork):
            report_step(coordinator, item.batch.step)
        if isinstance(item, SyncWork):
            version, identity = item.policy_version, f"weights of step {item.policy_version}"
            report_staged(coordinator, item, identity=identity)
            report_commit(coordinator, 0, version, identities=(identity,))
    kept = coordinator._state.syncs.identities
    assert version == 300 and min(kept) > 0 and 100 <= len(kept) <= 103
    assert kept[300] == "weights of step 300"


def test_running_ahead_is_bounded_by_slots_and_staleness_by_n_behind(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=40, n_behind=1)
    coordinator.add_producer(0, version=0)
    index, version, staleness = 0, 0, []
    for _ in range(4):
        finish_leases(coordinator, make_group, lease_all(coordinator), version=version)
        for _ in range(2):
            item = work(coordinator, index)
            assert isinstance(item, TrainWork)
            report_step(coordinator, item.batch.step)
            index += 1
        sync = work(coordinator, index)
        report_sync(coordinator, sync)
        version, index = sync.policy_version, index + 1
        work(coordinator, index)
    staleness = [event["staleness_max"] for event in events(coordinator, "step")]
    assert staleness == [0, 0, 1, 1, 1, 1, 1, 1]


def overdue(coordinator, *, producer=0):
    """The leases that a producer is told of when it asks for nothing else."""
    return coordinator.lease(producer, max_prompts=0, timeout_s=0).overdue


def test_a_long_response_may_be_overtaken_until_its_weights_would_be_too_old(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=40, n_behind=1)
    coordinator.add_producer(0, version=0)
    long, *others = lease_all(coordinator)  # both rollout steps of slots
    finish_leases(coordinator, make_group, others)
    assert [type(work(coordinator, index)) for index in (0, 1)] == [TrainWork, TrainWork], "of the seven others"
    report_sync(coordinator, work(coordinator, 2))
    assert isinstance(work(coordinator, 3), TrainWork)
    assert finish_leases(coordinator, make_group, lease_all(coordinator), version=2) == 4
    assert overdue(coordinator) == ()
    assert work(coordinator, 4) is None, "there are prompts enough, but the next sync would make the long one too old"
    assert overdue(coordinator) == (long.lease_id,), "its producer may cut it"
    assert overdue(coordinator, producer=1) == ()
    finish_leases(coordinator, make_group, [long])
    assert isinstance(work(coordinator, 4), TrainWork)


@pytest.mark.parametrize("n_behind", [0, 1, 2, 3])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 5))])
def test_staleness_stays_within_its_bound_in_whatever_order_responses_end(make_coordinator, make_group, n_behind, seed):
    rng = random.Random(seed)
    coordinator = make_coordinator(num_prompts=60, n_behind=n_behind)
    coordinator.add_producer(0, version=0)
    index, version, running = 0, 0, []
    while not events_of_end(coordinator):
        running += [(lease, version) for lease in lease_all(coordinator)]
        if running:  # one of them ends; under weights that may have changed meanwhile
            lease, begun_at = running.pop(rng.randrange(len(running)))
            finish_leases(coordinator, make_group, [lease], version=begun_at)
        item = work(coordinator, index)
        index += item is not None
        if isinstance(item, TrainWork):
            report_step(coordinator, item.batch.step)
        if isinstance(item, SyncWork):
            report_sync(coordinator, item)
            version = item.policy_version
    staleness = [event["staleness_max"] for event in coordinator.seen if event["event"] == "step"]
    assert len(staleness) == 30
    assert max(staleness) <= n_behind
    assert n_behind == 0 or max(staleness) >= 1


def test_a_producer_that_has_staged_gets_no_prompt_before_it_serves_the_weights(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=40, n_behind=1)
    coordinator.add_producer(0, version=0)
    coordinator.add_producer(1, version=0)
    finish_leases(coordinator, make_group, coordinator.lease(0, max_prompts=4, timeout_s=0).leases)
    work(coordinator, 0), work(coordinator, 1)
    sync = work(coordinator, 2)
    assert len(coordinator.lease(0, max_prompts=1, timeout_s=0).leases) == 1, "while the weights travel they roll out"
    report_staged(coordinator, sync)
    assert work(coordinator, 3) is None
    assert lease_all(coordinator, 0) == lease_all(coordinator, 1) == ()
    ahead = coordinator.lease(1, max_prompts=1, timeout_s=0, is_drained=True)
    assert len(ahead.leases) == 1 and ahead.policy_version == 2, "for the weights that are being committed"
    report_commit(coordinator, 0, 2)
    assert len(coordinator.lease(0, max_prompts=1, timeout_s=0).leases) == 1
    assert lease_all(coordinator, 1) == ()
    assert events(coordinator, "sync") == []
    report_commit(coordinator, 1, 2)
    assert events(coordinator, "sync")[0]["producers"] == [0, 1]


def test_trainers_go_on_while_producers_end_what_they_generate_but_not_to_the_next_sync(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=40, n_behind=1)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    work(coordinator, 0), work(coordinator, 1)
    report_staged(coordinator, work(coordinator, 2))
    assert [type(work(coordinator, index)) for index in (3, 4)] == [TrainWork, TrainWork]
    assert work(coordinator, 5) is None, "what is staged must not be overwritten"
    report_commit(coordinator, 0, 2)
    assert isinstance(work(coordinator, 5), SyncWork)


def test_what_a_commit_waits_for_is_overdue_once_the_next_sync_is_due(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=40, n_behind=2)
    coordinator.add_producer(0, version=0)
    coordinator.add_producer(1, version=0)
    (long,) = coordinator.lease(0, max_prompts=1, timeout_s=0).leases
    finish_leases(coordinator, make_group, lease_all(coordinator, 1), producer=1)
    work(coordinator, 0), work(coordinator, 1)
    report_staged(coordinator, work(coordinator, 2))
    report_commit(coordinator, 1, 2)
    assert [type(work(coordinator, index)) for index in (3, 4)] == [TrainWork, TrainWork]
    assert overdue(coordinator) == ()
    assert work(coordinator, 5) is None, "what is staged must not be overwritten"
    assert overdue(coordinator) == (long.lease_id,)


def test_a_producer_whose_commit_fails_is_removed_with_the_cause(make_coordinator, make_group):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=-1)
    report_staged(coordinator, work(coordinator, 0))
    report_commit(coordinator, 0, 0, error="3 requests still run")
    (lost,) = events(coordinator, "producer_lost")
    assert lost["cause"] == "version 0: 3 requests still run"


def test_an_engine_whose_answers_differ_from_the_trainers_stops_the_run(make_coordinator):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=-1)
    sync = work(coordinator, 0)
    coordinator.report_probe(ProbeReport(policy_version=0, logprobs=np.array([-1.0, -2.0], dtype=np.float32)))
    report_staged(coordinator, sync)
    report_commit(coordinator, 0, 0, probe=[-1.0, -2.5])
    (record,) = events(coordinator, "sync")
    assert (record["probe_gap_mean"], record["probe_gap_max"]) == (0.25, 0.5)
    with pytest.raises(
        RunError, match=r"producer-0: the engine's log-probabilities of the probe under version 0 are 0.25"
    ):
        work(coordinator, 1)


@pytest.mark.parametrize("served", [("b2", "b2"), ("b2", "c3"), ()])
def test_every_rank_of_an_engine_must_serve_the_weights_that_the_trainers_have(make_coordinator, served):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=-1)
    report_staged(coordinator, work(coordinator, 0), identity="b2")
    report_commit(coordinator, 0, 0, identities=served)
    if set(served) == {"b2"}:
        (record,) = events(coordinator, "sync")
        assert record["identity"] == "b2"
        return
    problem = r"^producer-0 serves weights with identities .* as version 0, the trainers have b2: "
    with pytest.raises(RunError, match=problem):
        work(coordinator, 1)


def test_a_producer_that_joins_late_gets_current_weights_before_its_first_prompt(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=16)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    work(coordinator, 0), work(coordinator, 1)
    report_sync(coordinator, work(coordinator, 2))
    assert work(coordinator, 3) is None
    coordinator.add_producer(1, version=0)
    assert lease_all(coordinator, producer=1) == ()
    join = work(coordinator, 3)
    assert join == SyncWork(index=3, policy_version=2, members=(1,), probe=PROBE)
    report_sync(coordinator, join)
    assert len(lease_all(coordinator, producer=1)) == 4


def test_a_producer_that_joins_is_probed_even_when_the_sync_is_not_due_for_it(make_coordinator, make_group):
    coordinator = make_coordinator(num_prompts=16, probe_interval=100)
    coordinator.add_producer(0, version=-1)
    first = work(coordinator, 0)
    report_sync(coordinator, first)
    coordinator.add_producer(1, version=-1)
    join = work(coordinator, 1)
    report_sync(coordinator, join)
    assert (first.probe, join.probe) == (PROBE, PROBE)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    work(coordinator, 2), work(coordinator, 3)
    assert work(coordinator, 4) == SyncWork(index=4, policy_version=2, members=(0, 1), probe=())


def test_a_sync_that_one_producer_did_not_survive_is_ordered_again_for_the_others(make_coordinator, make_group):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=0)
    coordinator.add_producer(1, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    work(coordinator, 0), work(coordinator, 1)
    sync = work(coordinator, 2)
    assert sync.members == (0, 1)
    report_sync(coordinator, sync, staged=(), failed={1: "died"})
    again = work(coordinator, 3)
    assert again == SyncWork(index=3, policy_version=2, members=(0,), probe=PROBE)
    report_sync(coordinator, again)
    assert work(coordinator, 4) is None
    assert len(lease_all(coordinator, producer=0)) == 4


def test_a_due_sync_waits_for_a_replacement_when_the_only_producer_is_gone(make_coordinator, make_group):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    work(coordinator, 0), work(coordinator, 1)
    coordinator.remove_producer(0, "killed")
    assert work(coordinator, 2) is None
    coordinator.add_producer(1, version=0)
    assert work(coordinator, 2) == SyncWork(index=2, policy_version=2, members=(1,), probe=PROBE)
