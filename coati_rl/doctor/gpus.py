"""Check the GPUs of this machine, if it has some: driver, NCCL, shared memory between processes, a gradient."""

import ctypes
from importlib import import_module
from typing import Any

from coati_rl.doctor.machine_check import Result
from coati_rl.processes.nvml import open_gpus
from coati_rl.text import count

NONE = Result(status="ok", evidence="no GPU: runs compute on the CPU")
_TOLERANCE = 1e-3  # relative difference of two float32 gradients; a packed row whose samples see each other makes 0.1
_MAX_TEXT = 80


def driver() -> Result:
    """Ask NVIDIA's driver for its GPUs, and torch whether it can use all of them."""
    nvml, handles = open_gpus()
    if not handles:
        return NONE
    text = ctypes.create_string_buffer(_MAX_TEXT)
    version = text.value.decode() if not nvml.nvmlSystemGetDriverVersion(text, _MAX_TEXT) else "unknown"
    evidence = f"{count(len(handles), 'GPU')}, driver {version}"
    import torch

    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not usable:
        return Result(
            status="fail",
            evidence=f"{evidence}, but torch {torch.__version__} (CUDA {torch.version.cuda}) can use none",
            remedy="install the packages for CUDA (COATI_DEVICE=gpu source scripts/environment.sh), a driver for their "
            "CUDA version, and look at CUDA_VISIBLE_DEVICES",
        )
    names = ", ".join(sorted({torch.cuda.get_device_name(index) for index in range(usable)}))
    return Result(status="ok", evidence=f"{evidence}, {usable} for torch: {names}, CUDA {torch.version.cuda}")


def nccl() -> Result:
    """Sum a tensor over up to two GPUs with NCCL, a process each; with one GPU in a group of one."""
    ranks = min(2, _num_gpus())
    if not ranks:
        return NONE
    from coati_rl.doctor.gpu_processes import sum_over_ranks

    sum_over_ranks(ranks, backend="nccl")
    return Result(status="ok", evidence=f"NCCL summed a tensor over {count(ranks, 'GPU')}")


def ipc() -> Result:
    """Share a GPU's memory with another process by CUDA IPC, as --weight-transport ipc does."""
    if not _num_gpus():
        return NONE
    from coati_rl.doctor.gpu_processes import share_memory

    share_memory()
    return Result(status="ok", evidence="another process read a GPU's memory by CUDA IPC")


def gradient(device: str = "") -> Result:
    """Compare the gradient of a packed row on a GPU with the CPU's, by the trainers' own forward."""
    if not device and not _num_gpus():
        return NONE
    # Above this package in the order of imports, so it is named here and imported when it runs.
    difference: Any = import_module("consumer.proofs.device").gradient_difference
    apart = difference(device or "cuda:0")
    evidence = f"the gradient of a packed row differs from the CPU's by {apart:.1e} (relative, float32)"
    if not apart <= _TOLERANCE:  # False for NaN
        return Result(
            status="fail",
            evidence=evidence,
            remedy="look for errors of its memory (nvidia-smi -q -d ECC); try another version of driver and torch",
        )
    return Result(status="ok", evidence=evidence)


def _num_gpus() -> int:
    if not open_gpus()[1]:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
