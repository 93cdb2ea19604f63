"""Test that trainers score the probe of a weight sync with each engine's routes, before their weights change."""

import numpy as np
import pytest

from coati_rl.errors import RunError
from coati_rl.types import CommitResult
from coati_rl.work import CommitReport, FinishWork, ProbeReport, ProbeWork, SaveWork, SyncWork, TrainWork
from tests.unit.coordinator.coordinator_calls import (
    PROBE,
    drive,
    events,
    finish_leases,
    lease_all,
    report_staged,
    report_step,
    work,
)

TRAINERS = np.array([-1.0, -2.0], dtype=np.float32)  # log-probabilities
ROUTES = np.arange(6, dtype=np.uint8).reshape(3, 1, 2)  # of three tokens, one layer, two experts


def report_commit(coordinator, producer, version, *, routes, logprobs=TRAINERS):
    result = CommitResult(seconds=0.0, probe_logprobs=logprobs, probe_routes=routes)
    coordinator.report_commit(CommitReport(producer=producer, policy_version=version, result=result))


def test_the_probe_of_each_engine_is_scored_with_its_routes_before_anything_is_trained(make_coordinator, make_group):
    coordinator = make_coordinator(replays_routes=True)
    for producer in (0, 1):
        coordinator.add_producer(producer, version=-1)
    report_staged(coordinator, work(coordinator, 0))
    report_commit(coordinator, 0, 0, routes=ROUTES)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    for index, (producer, routes) in enumerate(((0, ROUTES), (1, ROUTES + 1)), start=1):
        if producer == 1:
            assert work(coordinator, index) is None, "a step must not change the weights of the sync"
            report_commit(coordinator, 1, 0, routes=routes)
        item = work(coordinator, index)
        assert (type(item), item.policy_version, item.producer, item.probe) == (ProbeWork, 0, producer, PROBE)
        np.testing.assert_array_equal(item.routes, routes)
        assert work(coordinator, index + 1) is None and not events(coordinator, "sync")
        for _ in range(2):  # the answer to the first is lost
            coordinator.report_probe(ProbeReport(policy_version=0, logprobs=TRAINERS, producer=producer))
    assert [event["probe_gap_max"] for event in events(coordinator, "sync")] == [0.0]
    assert isinstance(work(coordinator, 3), TrainWork)


def test_an_engine_that_differs_with_its_own_routes_stops_the_run(make_coordinator):
    coordinator = make_coordinator(replays_routes=True)
    coordinator.add_producer(0, version=-1)
    report_staged(coordinator, work(coordinator, 0))
    report_commit(coordinator, 0, 0, routes=ROUTES, logprobs=TRAINERS - np.float32(0.5))
    work(coordinator, 1)
    coordinator.report_probe(ProbeReport(policy_version=0, logprobs=TRAINERS, producer=0))
    with pytest.raises(RunError, match=r"^producer-0: the engine's log-probabilities of the probe under version 0 are"):
        work(coordinator, 2)


def test_the_last_probe_is_scored_before_the_end(make_coordinator, make_group):
    coordinator, items = make_coordinator(num_prompts=4, replays_routes=True), []
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    for _ in range(6):
        items.append(item := work(coordinator, len(items)))
        if isinstance(item, TrainWork):
            report_step(coordinator, item.batch.step)
        if isinstance(item, SyncWork):
            report_staged(coordinator, item)
            report_commit(coordinator, 0, item.policy_version, routes=ROUTES)
        if isinstance(item, ProbeWork):
            report = ProbeReport(policy_version=item.policy_version, logprobs=TRAINERS, producer=item.producer)
            coordinator.report_probe(report)
    assert [type(item) for item in items] == [TrainWork, TrainWork, SyncWork, ProbeWork, SaveWork, FinishWork]


def test_without_replay_no_probe_is_scored_again(make_coordinator, make_group):
    coordinator = make_coordinator()
    coordinator.add_producer(0, version=-1)
    assert not [item for item in drive(coordinator, make_group) if isinstance(item, ProbeWork)]
