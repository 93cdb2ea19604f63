"""Test a cluster of two nodes that share only files: placement, connections and replacement."""

import signal

import pytest

from tests.integration.runs.records import assert_engine_and_trainer_agree, trained_samples
from tests.integration.runs.two_nodes import ADDRESSES, TwoNodes

pytestmark = pytest.mark.timeout(900)  # raylets start slowly on a busy machine

HEAD_CPUS = 3


@pytest.fixture(scope="module")
def nodes():
    """A head, alone so far."""
    world = TwoNodes(HEAD_CPUS)
    yield world
    world.end()


@pytest.fixture
def start(nodes, make_tiny, flags, tmp_path):
    """Sizes and more flags -> a run on the two nodes; one that a failing test leaves running is ended."""
    runs = []

    def make(*more, cpus, **sizes):
        nodes.join(cpus)
        runs.append(nodes.run([*flags(make_tiny(tied=True), **sizes), *more], tmp_path / "run"))
        return runs[-1]

    yield make
    for run in runs:
        if run.process.poll() is None:
            run.interrupt()
            run.wait(60)


def addresses_of(nodes, kind):
    """Address of the node -> how many actors of this kind are there."""
    return {address: len(nodes.processes(node, f"ray::{kind}")) for node, address in enumerate(ADDRESSES)}


@pytest.mark.full
def test_trainers_and_producers_are_put_where_they_fit_and_meet_across_nodes(nodes, start):
    # Both trainers fit on the node with 2 CPUs, which leaves the driver's own, with 3, to the producers: the trainers
    # meet at an address that the driver does not have, and the weights cross from one node to the other.
    run = start("--max-steps", 3, cpus=2, trainers=2, inferencers=2)
    run.wait_for_step(1)
    head, second = ADDRESSES
    assert addresses_of(nodes, "TrainerActor") == {head: 0, second: 2}
    assert addresses_of(nodes, "ProducerActor") == {head: 2, second: 0}
    assert addresses_of(nodes, "CoordinatorActor") == {head: 1, second: 0}
    assert run.wait() == 0, run.text()
    log = (run.run_dir / "logs" / "driver.log").read_text()
    assert f"trainer-1: 1 CPU at {second}, slot 1 of 2" in log, "cores are shared among the actors of a node"
    assert f"producer-1: 1 CPU at {head}, slot 1 of 2" in log
    records = run.records()
    assert [record["step"] for record in records] == [1, 2, 3]
    assert_engine_and_trainer_agree(records)
    assert (run.run_dir / "checkpoints" / "step-3" / "manifest.json").is_file()
    assert run.actors() == []


@pytest.mark.full
def test_a_run_that_no_node_has_room_for_is_refused_with_what_each_node_has(start):
    run = start("-ptp", 4, cpus=2)
    assert run.wait(120) == 2, run.text()
    last = run.text().splitlines()[-1]
    assert "1 trainer(s) of 1 CPU and 1 producer(s) of 4 CPUs on one node; no resources for 1 producer(s)" in last
    assert "10.231.0.1 3 of 3 CPUs, 0 of 0 GPUs; 10.231.0.2 2 of 2 CPUs, 0 of 0 GPUs" in last
    assert run.actors() == []


@pytest.mark.full
def test_weights_cross_nodes_and_a_run_goes_on_without_a_node_and_with_another_coordinator(nodes, start):
    # One trainer and a producer on the head, which then has a CPU left; the other producer on the second node.
    run = start("-b", "transformers", "-e", 1000, "--max-steps", 1000, cpus=3, trainers=1, inferencers=2)
    run.wait_for_step(2)
    head, second = ADDRESSES
    assert addresses_of(nodes, "CoordinatorActor") == {head: 1, second: 0}
    assert addresses_of(nodes, "TrainerActor") == {head: 1, second: 0}
    assert addresses_of(nodes, "ProducerActor") == {head: 1, second: 1}
    kill_raylet(nodes)
    run.wait_until(lambda: addresses_of(nodes, "ProducerActor") == {head: 2, second: 0})
    run.wait_for_step(len(run.records()) + 5)
    (coordinator,) = nodes.processes(0, "ray::CoordinatorActor")
    coordinator.kill()
    run.wait_for_step(len(run.records()) + 5)
    # the terminal follows the steps on a machine that is busy
    run.wait_for_text(" lost: ", "the coordinator was lost; another goes on")
    assert_engine_and_trainer_agree(run.records())
    samples = trained_samples(run, range(1, len(run.records()) + 1))
    assert len(samples) == len(set(samples)), "no sample was trained twice"
    run.interrupt()
    assert run.wait(60) == 130, run.text()
    step = len(run.records())
    last = run.text().splitlines()[-1]
    assert f"; resume from step {step} with: " in last and "/rl_example.py --config " in last
    assert (run.run_dir / "checkpoints" / f"step-{step}" / "manifest.json").is_file()
    log = (run.run_dir / "logs" / "driver.log").read_text()
    assert f": 1 CPU at {second}, slot 0 of 1" in log, "cores are shared among the actors of a node"
    assert run.actors() == []


@pytest.mark.full
def test_a_lost_node_ends_a_run_that_has_no_room_elsewhere_within_a_minute(nodes, start):
    # Both trainers on the head, which has one CPU left; both producers on the second node: only one can be replaced.
    run = start("-b", "fake", "-e", 1000, "--max-steps", 1000, cpus=3, trainers=2, inferencers=2)
    run.wait_for_step(2)
    assert addresses_of(nodes, "ProducerActor")[ADDRESSES[1]] == 2
    kill_raylet(nodes)
    assert run.wait(60) == 1, run.text()
    last = run.text().splitlines()[-1]
    assert f"the node at {ADDRESSES[1]} is lost" in last
    assert "no resources for 1 producer(s)" in last and "logs:" in last
    assert run.actors() == []


def kill_raylet(nodes):
    """End the second node as a power failure would."""
    (raylet,) = (process for process in nodes.processes(1) if process.name() == "raylet")
    raylet.send_signal(signal.SIGKILL)
