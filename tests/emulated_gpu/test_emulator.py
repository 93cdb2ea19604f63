"""Test that the emulator notices what a GPU or NCCL would refuse, and that copies and collectives are late."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from cupy.cuda import nccl

from coati_rl.errors import TransferError
from coati_rl.transport.nccl import connect, create_unique_id
from consumer.models.packed_attention import varlen_attn

pytestmark = pytest.mark.gpu


def on_two_ranks(function: Callable[[int, Any], Any], devices: tuple[int, int] = (0, 1)) -> list[Any]:
    """Return what two threads return, each with a rank and its communicator."""
    unique_id = create_unique_id()

    def run(rank: int) -> Any:
        with torch.cuda.device(devices[rank]):
            communicator = connect(unique_id=unique_id, rank=rank, world_size=2)
            try:
                return function(rank, communicator)
            finally:
                communicator.abort()

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(2)))


def broadcast(data: torch.Tensor, communicator: Any, stream: Any, kind: int = nccl.NCCL_FLOAT32) -> None:
    communicator.bcast(data.data_ptr(), data.numel(), kind, 0, stream.cuda_stream)


def wait_for_error(communicator: Any) -> None:
    for _ in range(1000):
        communicator.check_async_error()
        time.sleep(0.01)


def test_a_kernel_that_nothing_computes_fails_with_its_name() -> None:
    with pytest.raises(RuntimeError, match=r"nothing computes the kernel .*spin_kernel"):
        torch.cuda._sleep(1)


def test_a_tensor_of_the_host_or_of_another_gpu_is_refused() -> None:
    for other in (torch.ones(2), torch.ones(2, device="cuda:1")):
        with pytest.raises(RuntimeError, match="found at least two devices"):
            torch.ones(2, device="cuda:0") + other


def test_a_pinned_buffer_that_is_used_again_before_its_copy_has_ended_gives_other_bytes() -> None:
    pinned, on_gpu = torch.ones(4).pin_memory(), torch.zeros(4, device="cuda")
    on_gpu.copy_(pinned, non_blocking=True)
    pinned.fill_(2)
    assert on_gpu.tolist() == [2] * 4
    on_gpu.copy_(pinned, non_blocking=True)
    torch.cuda.current_stream().synchronize()
    pinned.fill_(3)
    assert on_gpu.tolist() == [2] * 4


def test_a_copy_on_another_stream_is_seen_after_waiting_for_it_only() -> None:
    source, target, side = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        target.copy_(source)
    assert target.tolist() == [0] * 4
    torch.cuda.current_stream().wait_stream(side)
    assert target.tolist() == [1] * 4


def test_a_broadcast_is_late_and_seen_through_an_event() -> None:
    def run(rank: int, communicator: Any) -> tuple[list[float], list[float]]:
        data, side, done = torch.full((4,), 1.0 - rank, device="cuda"), torch.cuda.Stream(), torch.cuda.Event()
        side.wait_stream(torch.cuda.current_stream())
        broadcast(data, communicator, side)
        done.record(side)
        before = data.tolist()
        torch.cuda.current_stream().wait_event(done)
        return before, data.tolist()

    assert on_two_ranks(run) == [([1.0] * 4, [1.0] * 4), ([0.0] * 4, [1.0] * 4)]


@pytest.mark.parametrize(("count", "kind"), [(3, nccl.NCCL_FLOAT32), (4, nccl.NCCL_INT32)])
def test_another_size_or_dtype_on_one_rank_is_an_error_there(count: int, kind: int) -> None:
    def run(rank: int, communicator: Any) -> None:
        data = torch.ones(4, device="cuda")[: count if rank else 4]
        broadcast(data, communicator, torch.cuda.current_stream(), kind if rank else nccl.NCCL_FLOAT32)
        if not rank:
            torch.cuda.current_stream().synchronize()  # an abort would take back what is not yet sent
        else:
            with pytest.raises(RuntimeError, match="INVALID_ARGUMENT"):
                wait_for_error(communicator)

    on_two_ranks(run)


def test_two_ranks_on_one_gpu_and_memory_of_another_gpu_are_refused() -> None:
    with pytest.raises(TransferError, match="INVALID_USAGE"):
        on_two_ranks(lambda rank, communicator: None, devices=(0, 0))

    def run(rank: int, communicator: Any) -> None:
        with pytest.raises(RuntimeError, match="INVALID_USAGE"):
            broadcast(torch.ones(4, device=f"cuda:{1 - rank}"), communicator, torch.cuda.current_stream())

    on_two_ranks(run)


@pytest.mark.parametrize(
    ("dtype", "longest", "message"), [(torch.int64, 4, "int32"), (torch.int32, 3, "below the longest sequence")]
)
def test_wrong_boundaries_of_packed_sequences_are_refused(dtype: torch.dtype, longest: int, message: str) -> None:
    query = torch.randn(6, 2, 8, device="cuda", dtype=torch.bfloat16)
    bounds = torch.tensor([0, 4, 6], device="cuda", dtype=dtype)
    with pytest.raises(RuntimeError, match=message):
        varlen_attn(query, query, query, bounds, bounds, longest, longest)


def test_host_syncs_are_refused_and_peak_memory_is_counted() -> None:
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.max_memory_allocated()
    data = torch.ones(2**20, device="cuda")
    assert torch.cuda.max_memory_allocated() - before == data.nbytes
    torch.cuda.set_sync_debug_mode("error")
    try:
        for wait in (lambda: data.sum().item(), lambda: data.nonzero(), lambda: data.cpu()):
            with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
                wait()
    finally:
        torch.cuda.set_sync_debug_mode("default")
