"""Do what takes two processes for the checks of GPUs: a sum over ranks, memory that another process reads."""

import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.multiprocessing.spawn import ProcessException, start_processes

from coati_rl.errors import RunError
from coati_rl.transport.deadline import Deadline

_TIMEOUT_S = 20.0
_NUM_BYTES = 2**20
_VALUE = 7


def sum_over_ranks(ranks: int, *, backend: str) -> None:
    """Sum a tensor over processes, each on its own GPU with nccl, on the CPU with gloo. Raises: RunError."""
    with tempfile.TemporaryDirectory() as directory:
        _run_ranks(_sum, ranks, str(Path(directory) / "store"), backend)


def share_memory() -> None:
    """Have another process read memory of GPU 0. Raises: RunError."""
    from coati_rl.transport.ipc import IpcSegment

    device = torch.device("cuda:0")
    segment = IpcSegment(device, "", _NUM_BYTES)
    handle = segment.create()
    mapped = segment.map(is_owner=True, deadline=Deadline(_TIMEOUT_S), what="doctor")
    mapped.fill_(_VALUE)
    torch.cuda.synchronize()
    _run_ranks(_read, 1, handle)


def _run_ranks(function: Any, ranks: int, *arguments: Any) -> None:
    start: Any = start_processes  # without type annotations
    context = start(function, (ranks, *arguments), nprocs=ranks, join=False, start_method="spawn")
    until = time.monotonic() + _TIMEOUT_S
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > until:
                raise RunError(f"{ranks} processes did not end within {_TIMEOUT_S:.0f} s")
    except ProcessException as error:
        raise RunError(str(error).strip().split("\n")[-1]) from error


def _sum(rank: int, ranks: int, store: str, backend: str) -> None:
    device = torch.device(f"cuda:{rank}" if backend == "nccl" else "cpu")
    dist.init_process_group(
        backend,
        store=FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=_TIMEOUT_S),
    )
    values = torch.full((1024,), float(rank + 1), device=device)
    dist.all_reduce(values)
    if not bool((values == ranks * (ranks + 1) / 2).all()):
        raise RunError(f"rank {rank} has another sum: {values[0].item()}")
    dist.destroy_process_group()


def _read(_: int, __: int, handle: str) -> None:
    from coati_rl.transport.ipc import IpcSegment

    segment = IpcSegment(torch.device("cuda:0"), "", _NUM_BYTES)
    segment.open(handle)
    mapped = segment.map(is_owner=False, deadline=Deadline(_TIMEOUT_S), what="doctor")
    if not bool((mapped == _VALUE).all()):
        raise RunError("the other process reads other bytes")
