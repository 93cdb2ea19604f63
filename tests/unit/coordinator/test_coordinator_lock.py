"""Test that what takes long happens without the coordinator's lock: packing batches and writing files."""

import threading
from contextlib import contextmanager

import pytest

from coati_rl.batching.batcher import StepBatcher
from coati_rl.errors import RunError
from coati_rl.observability.rollouts import RolloutRecorder
from coati_rl.work import FinishWork, SaveWork, TrainWork, Wait
from tests.unit.coordinator.coordinator_calls import (
    drive,
    events,
    finish_leases,
    lease_all,
    report_step,
    report_sync,
    work,
)
from tests.unit.coordinator.driver import rollouts

SOON_S = 20.0


class Gate:
    """A step of the coordinator that stops in the middle until it is let through."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.opened.wait(SOON_S)


@pytest.fixture
def hold(monkeypatch):
    """(class, method) -> a gate in front of it, open when the test ends."""
    gates = []

    def hold(cls, name):
        gate, honest = Gate(), getattr(cls, name)
        gates.append(gate)

        def held(self, *args, **options):
            gate()
            return honest(self, *args, **options)

        monkeypatch.setattr(cls, name, held)
        return gate

    yield hold
    for gate in gates:
        gate.opened.set()


@contextmanager
def calling(function):
    """Another thread calls it; its result is the one element of the list, at the end of the block."""
    results = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    yield results
    thread.join(SOON_S)
    assert not thread.is_alive()


def take_two_steps(coordinator):
    """Take two optimizer steps, and the weight sync after them."""
    for step in (0, 1):
        coordinator.next_work(step, rank=0, timeout_s=0)
        report_step(coordinator, step)
    report_sync(coordinator, coordinator.next_work(2, rank=0, timeout_s=0))


def test_producers_hand_in_and_lease_while_a_batch_is_packed(make_coordinator, make_group, hold):
    coordinator = make_coordinator(num_prompts=16)
    coordinator.add_producer(0, version=0)
    leases = lease_all(coordinator)
    finish_leases(coordinator, make_group, leases[:2])
    packing = hold(StepBatcher, "add")
    with calling(lambda: work(coordinator, 0)) as first:
        assert packing.reached.wait(SOON_S)
        assert finish_leases(coordinator, make_group, leases[2:]) == 2
        assert coordinator.lease(0, max_prompts=1, timeout_s=0).leases == (), "no slot is free before the next sync"
        assert coordinator.next_work(0, rank=0, timeout_s=0) == Wait(reason="item 0 is being built")
        packing.opened.set()
    assert isinstance(first[0], TrainWork) and first[0].batch.step == 0
    assert work(coordinator, 0) is first[0], "one batch for all who ask"
    assert work(coordinator, 1).batch.step == 1


def test_a_batch_that_cannot_be_packed_ends_the_run_for_every_trainer(make_coordinator, make_group, monkeypatch):
    def fail(self, groups):
        raise RunError("--advantage-estimator own.py:f: division by zero")

    monkeypatch.setattr(StepBatcher, "add", fail)
    coordinator = make_coordinator(dp=2, train_batch_size=1, train_minibatch_size=1)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    for rank in (0, 1):
        with pytest.raises(RunError, match="division by zero"):
            work(coordinator, 0, rank=rank)


def test_trainers_and_producers_go_on_while_rollouts_are_written(make_coordinator, make_group, hold, tmp_path):
    writing = hold(RolloutRecorder, "write")
    coordinator = make_coordinator(num_prompts=16)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    for step in (0, 1):
        assert isinstance(coordinator.next_work(step, rank=0, timeout_s=0), TrainWork)
        report_step(coordinator, step)
    assert writing.reached.wait(SOON_S)
    assert [event["event"] for event in coordinator.events(0, timeout_s=0)] == ["producer_joined"]
    report_sync(coordinator, coordinator.next_work(2, rank=0, timeout_s=0))
    assert isinstance(coordinator.next_work(3, rank=0, timeout_s=0), Wait)
    assert len(lease_all(coordinator)) == 4
    writing.opened.set()
    assert [event["step"] for event in events(coordinator, "step")] == [1, 2]
    assert [line["step"] for line in rollouts(tmp_path)] == [1] * 4 + [2] * 4


def test_a_checkpoint_waits_for_the_rollouts_of_its_steps(make_coordinator, make_group, hold, tmp_path):
    writing = hold(RolloutRecorder, "write")
    coordinator = make_coordinator(num_prompts=16, save_interval=2)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    take_two_steps(coordinator)
    wait = coordinator.next_work(3, rank=0, timeout_s=0)
    assert wait == Wait(reason="waiting for rollouts to be written, before the checkpoint of step 2")
    with calling(lambda: coordinator.next_work(3, rank=0, timeout_s=SOON_S)) as item:
        writing.opened.set()
    assert isinstance(item[0], SaveWork)
    assert len(rollouts(tmp_path)) == 8


def test_a_checkpoint_is_told_of_when_the_rollouts_that_came_in_meanwhile_are_written(
    make_coordinator, make_group, hold, tmp_path
):
    coordinator = make_coordinator(num_prompts=16)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    coordinator.next_work(0, rank=0, timeout_s=0)
    coordinator.stop()  # which waits for nothing
    assert isinstance(coordinator.next_work(1, rank=0, timeout_s=0), SaveWork)
    writing = hold(RolloutRecorder, "write")
    report_step(coordinator, 0)
    with calling(lambda: coordinator.report_saved(1, "there")):
        assert writing.reached.wait(SOON_S)
        assert [event["event"] for event in coordinator.events(0, timeout_s=0)] == ["producer_joined"]
        writing.opened.set()
    assert [event["event"] for event in coordinator.events(1, timeout_s=0)] == ["step", "checkpoint"]
    assert len(rollouts(tmp_path)) == 4


def test_trainers_wait_for_a_disk_that_is_behind_by_more_than_two_steps(
    make_coordinator, make_group, hold, monkeypatch
):
    writing = hold(RolloutRecorder, "write")
    coordinator = make_coordinator(num_prompts=16, n_behind=1)
    coordinator.add_producer(0, version=0)
    finish_leases(coordinator, make_group, lease_all(coordinator))
    take_two_steps(coordinator)
    coordinator.next_work(3, rank=0, timeout_s=0)
    reported = threading.Event()
    with calling(lambda: (report_step(coordinator, 2), reported.set())):
        assert not reported.wait(0.2)
        writing.opened.set()
        assert reported.wait(SOON_S)


def test_an_evaluation_is_over_when_its_files_are_written(make_coordinator, make_group, hold, tmp_path):
    coordinator = make_coordinator(num_prompts=4, eval_prompts=1, eval_interval=2)
    writing = hold(type(coordinator._state.evaluation), "write")
    coordinator.add_producer(0, version=0)
    evaluation = coordinator.lease(0, max_prompts=1, timeout_s=0).leases
    finish_leases(coordinator, make_group, [*evaluation, *lease_all(coordinator)])
    for step in (0, 1):
        coordinator.next_work(step, rank=0, timeout_s=0)
    assert writing.reached.wait(SOON_S)
    wait = coordinator.next_work(2, rank=0, timeout_s=0)
    assert wait == Wait(reason="waiting for the evaluation at step 0: its files are being written")
    writing.opened.set()
    items = drive_on(coordinator, make_group)
    assert isinstance(items[-1], FinishWork)
    assert [event["step"] for event in events(coordinator, "evaluation")] == [0, 2]
    assert len((tmp_path / "eval" / "summary.jsonl").read_text().splitlines()) == 2


def drive_on(coordinator, make_group):
    report_step(coordinator, 0), report_step(coordinator, 1)
    return drive(coordinator, make_group, begun=2)


@pytest.mark.parametrize("what", ["rollouts", "eval"])
def test_a_full_disk_ends_the_run_with_path_and_remedy(make_coordinator, make_group, tmp_path, what):
    coordinator = make_coordinator(num_prompts=16, eval_prompts=1, eval_interval=2)
    coordinator.add_producer(0, version=0)
    names = {"rollouts": "steps-000001-000100.jsonl", "eval": "summary.jsonl"}
    (tmp_path / what).mkdir()
    (tmp_path / what / names[what]).symlink_to("/dev/full")
    evaluation = coordinator.lease(0, max_prompts=1, timeout_s=0).leases
    finish_leases(coordinator, make_group, [*evaluation, *lease_all(coordinator)])
    message = f"{tmp_path}/{what}.* cannot be written: No space left on device; free space there"
    coordinator.next_work(0, rank=0, timeout_s=0)
    report_step(coordinator, 0)
    with pytest.raises(RunError, match=message):
        coordinator.flush(timeout_s=SOON_S)
    with pytest.raises(RunError, match=message):
        coordinator.next_work(1, rank=0, timeout_s=0)
    assert coordinator.lease(0, max_prompts=1, timeout_s=0).leases == ()
