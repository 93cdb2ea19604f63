"""Test which cores a process on GPUs gets."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coati_rl.processes import actor_process as process
from coati_rl.processes.actor_process import ActorContext, enter_actor
from coati_rl.processes.nvml import cores_by_gpu, share_of_near_cores
from tests.unit.runtime.nvml_library import NvmlLibrary

FIRST, SECOND = frozenset(range(8)), frozenset(range(8, 16))


def test_the_driver_says_which_cores_are_near_a_gpu():
    near = cores_by_gpu(lambda name: NvmlLibrary())
    assert near == [FIRST | {64}, FIRST | {64}, SECOND, SECOND]
    assert cores_by_gpu(lambda name: NvmlLibrary("nvmlDeviceGetCpuAffinity")) == [frozenset()] * 4


@pytest.mark.parametrize(
    ("gpus", "near", "cores", "share"),
    [
        ([0], [FIRST, FIRST, SECOND, SECOND], range(16), [0, 1, 2, 3]),
        ([1], [FIRST, FIRST, SECOND, SECOND], range(16), [4, 5, 6, 7]),
        ([3], [FIRST, FIRST, SECOND, SECOND], range(16), [12, 13, 14, 15]),
        ([1, 2], [FIRST, FIRST, SECOND, SECOND], range(16), [4, 5, 6, 7, 8, 9, 10, 11]),  # an engine of two ranks
        ([2], [FIRST, FIRST, SECOND, SECOND], [0, 1, 2, 9, 11, 13], [9]),  # a container with some of the cores
        ([0], [FIRST, FIRST, SECOND, SECOND], [3], []),  # the other process on this node would have none
        ([0], [frozenset()], range(16), []),
        ([4], [FIRST], range(16), []),  # the driver shows fewer GPUs than there are
        ([], [FIRST], range(16), []),
    ],
)
def test_a_process_gets_cores_near_its_gpus(gpus, near, cores, share):
    assert share_of_near_cores(gpus, near, list(cores)) == share


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8), st.integers(1, 12))
def test_no_two_gpus_share_a_core(nodes, cores_per_node):
    near = [frozenset(range(node * cores_per_node, (node + 1) * cores_per_node)) for node in nodes]
    shares = [share_of_near_cores([gpu], near, list(range(3 * cores_per_node))) for gpu in range(len(nodes))]
    assert sum(map(len, shares)) == len({core for share in shares for core in share})
    assert all(set(share) <= its_near for share, its_near in zip(shares, near, strict=True))


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("cuda", "2", [3]), ("cuda", "GPU-5f", [1]), ("cuda", None, [1]), ("cpu", "2", [1])],
)
def test_an_actor_is_pinned_near_its_gpu_and_by_its_place_where_that_is_unknown(
    monkeypatch, tmp_path: Path, device, visible, expected
):
    pinned = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 3})
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: pinned.extend(cores))
    monkeypatch.setattr(process, "cores_by_gpu", lambda: [frozenset({0, 1})] * 2 + [frozenset({3})])
    monkeypatch.setattr(process, "end_with_parent", lambda: (_ for _ in ()).throw(KeyboardInterrupt))  # the rest
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(KeyboardInterrupt):
        enter_actor(ActorContext(name="a", log_dir=tmp_path, device=device, dtype="float32", slot=1, num_slots=4))
    assert pinned == expected
