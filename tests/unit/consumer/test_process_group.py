"""Test the trainers' store and process group without other ranks."""

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from coati_rl.errors import CollectiveError, ConfigError, EngineError
from consumer.parallel.process_group import (
    StoreLocation,
    all_gather_texts,
    collective,
    destroy_process_group,
    init_process_group,
    open_listener,
    private_store_location,
    timeout_of_new_groups,
)


def test_a_listener_is_on_its_address_alone_at_a_port_of_its_own() -> None:
    with open_listener("127.0.0.1") as first, open_listener("127.0.0.1") as second:
        ports = {listener.getsockname()[1] for listener in (first, second)}
        assert len(ports) == 2
        open_here = [c.laddr for c in psutil.Process().net_connections(kind="inet") if c.status == psutil.CONN_LISTEN]
        assert {address.ip for address in open_here if address.port in ports} == {"127.0.0.1"}


def test_a_port_that_is_taken_is_refused_with_the_remedy() -> None:
    with open_listener("127.0.0.1") as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}: .* --master_port 0"):
            open_listener("127.0.0.1", port)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        open_listener("192.0.2.1")


@pytest.mark.parametrize("point", [StoreLocation(address="127.0.0.1", port=1), private_store_location("127.0.0.1")])
def test_only_rank_0_brings_a_listener_where_the_store_has_a_port(point: StoreLocation) -> None:
    with open_listener("127.0.0.1") as listener, pytest.raises(ValueError, match="only rank 0"):
        init_process_group(
            rank=0,
            world_size=1,
            rendezvous=point,
            listener=listener if point.file else None,
            timeout_s=1.0,
            seed=0,
            device="cpu",
        )


@pytest.mark.full
def test_a_store_leaves_no_directory_when_its_process_has_ended(tmp_path: Path) -> None:
    code = (
        "from consumer.parallel.process_group import private_store_location\n"
        "assert private_store_location('127.0.0.1').file.parent.is_dir()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TMPDIR": str(tmp_path)}, timeout=120)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_file", [False, True])
def test_a_rank_that_does_not_arrive_is_missed_in_time(is_file: bool) -> None:
    listener, point = None, private_store_location("127.0.0.1")
    if not is_file:
        listener = open_listener("127.0.0.1")
        point = StoreLocation(address="127.0.0.1", port=listener.getsockname()[1])
    with pytest.raises(EngineError, match="trainer 0 of 2 could not join"):
        init_process_group(
            rank=0, world_size=2, rendezvous=point, listener=listener, timeout_s=1.0, seed=0, device="cpu"
        )
    assert not dist.is_initialized()


def test_a_private_meeting_point_is_open_to_nobody_else_and_nothing_listens_for_it() -> None:
    before = listening()
    point = private_store_location("127.0.0.1")
    init_process_group(rank=0, world_size=1, rendezvous=point, timeout_s=20.0, seed=0, device="cpu")
    try:
        assert point.file is not None and point.file.exists()
        assert stat.S_IMODE(point.file.parent.stat().st_mode) == 0o700
        (gloo,) = listening() - before  # a TCP store would be another
        assert gloo[0] == "127.0.0.1"
        assert all_gather_texts("naïve") == ["naïve"]
        assert all_gather_texts("") == [""]
    finally:
        destroy_process_group()


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


def test_an_error_of_ours_passes_through_a_collective_unchanged() -> None:
    with pytest.raises(EngineError, match="its own"), collective("do anything"):
        raise EngineError("its own")


def wrong_dtype() -> None:
    torch.ones(2, 2) @ torch.ones(2, 2, dtype=torch.bfloat16)


def wrong_size() -> None:
    dist.all_gather_into_tensor(torch.ones(3), torch.ones(2))


def raising(error: RuntimeError) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


@pytest.fixture
def alone() -> Iterator[None]:
    """The process group of one trainer."""
    point = private_store_location("127.0.0.1")
    init_process_group(rank=0, world_size=1, rendezvous=point, timeout_s=20.0, seed=0, device="cpu")
    yield
    destroy_process_group()


@pytest.mark.parametrize(
    "act",
    [
        raising(torch.OutOfMemoryError("CUDA out of memory")),
        raising(torch.AcceleratorError("CUDA error: device-side assert triggered")),
        raising(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`")),
        wrong_dtype,
        wrong_size,
    ],
    ids=["out of memory", "assertion of a kernel", "cuBLAS", "wrong dtype", "wrong size"],
)
def test_a_trainers_own_error_is_not_laid_on_another_and_says_what_was_done(
    alone: None, act: Callable[[], None]
) -> None:
    with pytest.raises(RuntimeError) as caught, collective("run the model"):
        act()
    assert not isinstance(caught.value, EngineError)
    assert caught.value.__notes__ == ["trainer 0 of 1 tried to run the model"]


@pytest.mark.parametrize(
    "error",
    [
        dist.DistBackendError("NCCL error: remote process exited"),
        RuntimeError(
            "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv"
        ),
    ],
    ids=["NCCL", "gloo"],
)
def test_an_error_of_a_connection_names_trainer_and_phase(alone: None, error: RuntimeError) -> None:
    message = "trainer 0 of 1 could not sum gradients; another trainer has probably"
    with pytest.raises(CollectiveError, match=message), collective("sum gradients"):
        raise error


def test_groups_that_others_make_meanwhile_have_our_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def new_group(ranks: list[int], **settings: Any) -> None:
        made.append({"ranks": ranks, **settings})

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(EngineError), timeout_of_new_groups(7.0):
        dist.new_group([0, 1], backend="gloo")
        raise EngineError("whatever happens")
    assert made == [{"ranks": [0, 1], "backend": "gloo", "timeout": timedelta(seconds=7)}]
    assert dist.new_group is new_group
