"""Choose the transport of the weights: the requested one if it can work here, for `auto` the fastest that can."""

import os
from typing import Literal

from coati_rl.errors import ConfigError
from coati_rl.transport.rendezvous import CollectiveBackend

WeightTransport = Literal["auto", "gloo", "nccl", "shm", "ipc", "file"]

_SHARED_MEMORY = "/dev/shm"


def choose_backend(
    requested: WeightTransport,
    *,
    device: Literal["cpu", "cuda"],
    is_one_node: bool,
    update_bytes: int = 0,
    shares_process: bool = False,
    in_turns: bool = False,
) -> CollectiveBackend:
    """Return the backend of weight transfers.

    Args:
        requested: `--weight-transport`.
        device: of trainers and engines.
        is_one_node: True if all of them are on the same machine.
        update_bytes: of all weights; shared memory is chosen where it holds them three times: two segments that are
            used alternately, and that of an old group while a new one is opened.
        shares_process: an engine and a trainer are in one process, on one GPU, which NCCL takes for one rank alone.
        in_turns: engines are on the trainers' GPUs in processes of their own, and sleep; updates are staged on the
            host, so that they take no memory of the GPU from the side whose turn it is.
    Raises: ConfigError if the requested one cannot work.
    """
    shares_gpu = shares_process or in_turns
    if requested == "auto":
        if device == "cuda" and not in_turns:
            return "nccl" if not shares_process else "ipc" if is_one_node else "gloo"
        return "shm" if is_one_node and _shared_memory() >= 3 * update_bytes else "gloo"
    if requested in ("nccl", "ipc") and device != "cuda":
        raise ConfigError(f"--weight-transport {requested} needs CUDA devices, this run is on CPU: choose auto")
    if requested == "nccl" and shares_gpu:
        raise ConfigError(
            "--weight-transport nccl needs a GPU for each trainer and engine, here they share one: choose auto"
        )
    if requested in ("shm", "ipc") and not is_one_node:
        nearest = "nccl" if device == "cuda" and not shares_gpu else "gloo"
        raise ConfigError(
            f"--weight-transport {requested} needs all trainers and producers on one node, this run has several: "
            f"choose {nearest}, or file with a shared disk"
        )
    return requested


def _shared_memory() -> int:
    """Return the free bytes of shared memory; containers often have 64 MiB."""
    try:
        free = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return -1
    return free.f_bavail * free.f_frsize
