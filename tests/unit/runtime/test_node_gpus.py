"""Test what nodes say of their GPUs, and the refusal of a run that does not fit them, with stand-ins for nodes."""

from types import SimpleNamespace

import pytest

from coati_rl.errors import ConfigError
from coati_rl.runtime import actor_group, node_gpus
from coati_rl.runtime.node_gpus import NodeGpus, check_node_gpus, read_gpus
from tests.unit.runtime.nvml_library import GIB, NvmlLibrary

H100, H200 = (NodeGpus(count=8, num_bytes=size * GIB, name=name) for size, name in ((80, "H100"), (141, "H200")))
NODES = {"a": "10.0.0.1", "b": "10.0.0.2"}


def needs(num_gib):
    def check(gpu_bytes):
        if gpu_bytes < num_gib * GIB:
            raise ConfigError(f"-ptp 1: an engine rank needs {num_gib} GiB; nearest: -ptp 2")

    return check


def test_the_smallest_gpu_of_all_nodes_counts_and_the_refusal_says_what_each_node_has(caplog):
    check_node_gpus(needs(80), NODES, ask=lambda ids: [H200, H100])
    with pytest.raises(ConfigError) as caught:
        check_node_gpus(needs(100), NODES, ask=lambda ids: [H200, H100])
    assert str(caught.value) == (
        "-ptp 1: an engine rank needs 100 GiB; nearest: -ptp 2 (the cluster: 10.0.0.1 8 x H200 with 141.0 GiB; "
        "10.0.0.2 8 x H100 with 80.0 GiB)"
    )
    assert not caplog.records


def test_a_node_that_does_not_answer_is_not_compared(caplog):
    check_node_gpus(needs(100), NODES, ask=lambda ids: [None, None])
    assert [record.args[0] for record in caplog.records] == ["10.0.0.1", "10.0.0.2"]
    with pytest.raises(ConfigError):
        check_node_gpus(needs(100), NODES, ask=lambda ids: [None, H100])


@pytest.mark.parametrize(("address", "device", "is_asked"), [("10.0.0.1", "cuda", True), (None, "cuda", False)])
def test_a_clusters_nodes_are_asked_before_any_actor_is_made(monkeypatch, address, device, is_asked):
    made = []
    monkeypatch.setattr(actor_group, "own_namespace", lambda: "run")
    monkeypatch.setattr(actor_group, "PlacementManager", lambda config, device: SimpleNamespace(nodes=NODES))
    monkeypatch.setattr(node_gpus, "check_node_gpus", lambda check, nodes: check_node_gpus(check, nodes, ask=answer))

    def make_coordinator(*args, namespace):
        made.append("coordinator")
        return SimpleNamespace(client=None)

    monkeypatch.setattr(actor_group, "CoordinatorActor", make_coordinator)
    monkeypatch.setattr(actor_group, "HangTimeouts", SimpleNamespace(of=lambda config, **sizes: None))
    monkeypatch.setattr(actor_group, "ray_heartbeats", lambda timeouts: None)
    config = SimpleNamespace(
        cluster=SimpleNamespace(master_address=address),
        model=SimpleNamespace(model="none"),
        lora=SimpleNamespace(is_on=False),
        engine_urls=(),
    )
    plan = SimpleNamespace(device=device, precision="bf16")
    prepared = SimpleNamespace(config=config, plan=plan, check_gpus=needs(100))
    if is_asked:
        with pytest.raises(ConfigError, match=r"nearest: -ptp 2 \(the cluster"):
            actor_group.ActorGroup(prepared, SimpleNamespace(logs=None), SimpleNamespace(coordinator=None))
    else:
        actor_group.ActorGroup(prepared, SimpleNamespace(logs=None), SimpleNamespace(coordinator=None))
    assert made == ([] if is_asked else ["coordinator"])


def answer(node_ids):
    return [H100 for _ in node_ids]


def test_a_node_reads_its_gpus_from_the_driver():
    assert read_gpus(lambda name: NvmlLibrary()) == NodeGpus(count=4, num_bytes=40 * GIB, name="GPU 2")


@pytest.mark.parametrize("fails", ["nvmlInit_v2", "nvmlDeviceGetCount_v2", "nvmlDeviceGetMemoryInfo"])
def test_a_node_without_a_driver_that_answers_says_nothing(fails):
    assert read_gpus(lambda name: NvmlLibrary(fails)) is None


def test_a_node_without_the_library_says_nothing():
    def load(name):
        raise OSError(name)

    assert read_gpus(load) is None
