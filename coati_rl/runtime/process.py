"""Set up an actor process: its share of the cores, its log file, and an end that follows its parent's."""

import ctypes
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from coati_rl.types import Device

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorContext:
    """Describe where an actor runs and what it may use."""

    name: str  # such as "producer-0"
    log_dir: Path
    device: Device
    dtype: str  # "float32" or "bfloat16": of engine weights and of the weight wire
    slot: int  # number of this actor among those of its machine
    num_slots: int  # actors that share the machine


def core_share(slot: int, num_slots: int, cores: list[int]) -> list[int]:
    """The cores of one of `num_slots` processes: disjoint shares while they last, then one core each, in turn."""
    share = max(1, len(cores) // num_slots)
    first = slot * share % len(cores)
    return cores[first : first + share]


def device_environment(device: Device, precision: str) -> dict[str, str]:
    """Environment variables of a process that computes on `device`, read when it starts.

    On a machine with GPUs a run on the CPU must not find them: vLLM and ColossalAI would each choose for themselves.
    """
    if device == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}
    # Triton's kernels, vLLM's attention among them, multiply float32 in TF32 (10 bits of mantissa) unless told.
    return {"TRITON_F32_DEFAULT": "ieee"} if precision == "fp32" else {}


def enter_actor(context: ActorContext) -> None:
    """Pin this process, send its output to its log file, and tie its life to its parent's."""
    os.sched_setaffinity(0, core_share(context.slot, context.num_slots, sorted(os.sched_getaffinity(0))))
    die_with_parent()
    context.log_dir.mkdir(parents=True, exist_ok=True)
    log = os.open(context.log_dir / f"{context.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr, force=True)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends, whatever ended it (Linux)."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)
