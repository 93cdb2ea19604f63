"""Test which transport a run gets."""

import pytest

from coati_rl.errors import ConfigError
from coati_rl.transport.choice import choose_backend


@pytest.mark.parametrize(
    ("device", "is_one_node", "backend"),
    [("cuda", True, "nccl"), ("cuda", False, "nccl"), ("cpu", True, "shm"), ("cpu", False, "gloo")],
)
def test_auto_takes_the_fastest_that_works_everywhere(device, is_one_node, backend):
    assert choose_backend("auto", device=device, is_one_node=is_one_node) == backend


@pytest.mark.parametrize(("is_one_node", "backend"), [(True, "ipc"), (False, "gloo")])
def test_an_engine_in_a_trainer_s_process_shares_its_gpu_which_nccl_cannot(is_one_node, backend):
    assert choose_backend("auto", device="cuda", is_one_node=is_one_node, shares_process=True) == backend
    with pytest.raises(ConfigError, match=r"nccl needs a GPU for each trainer and engine.*choose auto"):
        choose_backend("nccl", device="cuda", is_one_node=is_one_node, shares_process=True)


@pytest.mark.parametrize(("is_one_node", "backend"), [(True, "shm"), (False, "gloo")])
def test_in_turns_on_one_gpu_weights_are_staged_on_the_host(is_one_node, backend):
    assert choose_backend("auto", device="cuda", is_one_node=is_one_node, in_turns=True) == backend
    with pytest.raises(ConfigError, match=r"nccl needs a GPU for each trainer and engine"):
        choose_backend("nccl", device="cuda", is_one_node=is_one_node, in_turns=True)


def test_auto_leaves_shared_memory_alone_that_cannot_hold_three_updates():
    assert choose_backend("auto", device="cpu", is_one_node=True, update_bytes=1 << 60) == "gloo"
    assert choose_backend("shm", device="cpu", is_one_node=True, update_bytes=1 << 60) == "shm"


@pytest.mark.parametrize("requested", ["gloo", "shm", "file"])
def test_what_is_possible_is_taken_as_requested(requested):
    assert choose_backend(requested, device="cpu", is_one_node=True) == requested


@pytest.mark.parametrize(
    ("requested", "device", "is_one_node", "message"),
    [
        ("nccl", "cpu", True, "nccl needs CUDA devices.*choose auto"),
        ("ipc", "cpu", True, "ipc needs CUDA devices"),
        ("shm", "cpu", False, "shm needs all trainers and producers on one node.*choose gloo"),
        ("ipc", "cuda", False, "ipc needs all trainers and producers on one node.*choose nccl"),
    ],
)
def test_what_cannot_work_is_refused_with_the_remedy(requested, device, is_one_node, message):
    with pytest.raises(ConfigError, match=message):
        choose_backend(requested, device=device, is_one_node=is_one_node)
