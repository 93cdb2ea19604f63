"""Set up an actor process: pin it to cores, open its log file, and end it with its parent."""

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from coati_rl.processes.ending import end_with_parent
from coati_rl.processes.nvml import cores_by_gpu, share_of_near_cores
from coati_rl.types import Device

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# What glibc is told where tensors are on a CPU. They come and go with every operation, and fresh memory costs a page
# fault per 4 KiB: huge pages, of 2 MiB, are asked for where the system leaves that to programs.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorContext:
    """Describe an actor's node, device and log."""

    name: str  # such as "producer-0"
    log_dir: Path
    device: Device
    dtype: str  # "float32" or "bfloat16": of engine weights and of weight transfers
    slot: int  # number of this actor among those of its machine
    num_slots: int  # actors that share the machine
    gpus: tuple[int, ...] = ()  # of the machine, that this actor shares with others; empty: those that Ray gives it
    address: str = ""  # of rank 0's machine, for the trainers of others; empty: they are all here, or Ray knows it
    server: str = ""  # URL of a producer's engine; empty: it makes its own


def assigned_cores(slot: int, num_slots: int, cores: list[int]) -> list[int]:
    """Return the cores of one of `num_slots` processes: disjoint sets while there are enough, then one core each."""
    count = max(1, len(cores) // num_slots)
    first = slot * count % len(cores)
    return cores[first : first + count]


def own_gpus() -> list[int]:
    """Return the numbers of the GPUs that Ray gave this process; none if it gave none, or named them otherwise."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return [int(name) for name in names] if all(name.isdecimal() for name in names) else []


def device_environment(device: Device, precision: str) -> dict[str, str]:
    """Return the environment variables of a process that computes on `device`, read when it starts.

    On a machine with GPUs a run on the CPU must not find them: vLLM and ColossalAI choose their device independently.
    """
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    # Triton's kernels, vLLM's attention among them, multiply float32 in TF32 (10 bits of mantissa) by default.
    return {"TRITON_F32_DEFAULT": "ieee"} if precision == "fp32" else {}


def enter_actor(context: ActorContext) -> None:
    """Pin this process, redirect its output to its log file, and have it end with its parent."""
    if context.gpus:  # before CUDA is used
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, context.gpus))
    cores = sorted(os.sched_getaffinity(0))
    near = share_of_near_cores(own_gpus(), cores_by_gpu(), cores) if context.device == "cuda" else []
    os.sched_setaffinity(0, near or assigned_cores(context.slot, context.num_slots, cores))
    end_with_parent()
    context.log_dir.mkdir(parents=True, exist_ok=True)
    log = os.open(context.log_dir / f"{context.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)
