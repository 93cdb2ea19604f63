"""Ask NVIDIA's driver (NVML) for all GPUs of this machine, and for the cores near them.

Source: NVIDIA's NVML API reference.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

_LIBRARY = "libnvidia-ml.so.1"
_WORD_BITS = 64
_MAX_CORES = 4096


def open_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> tuple[Any, list[ctypes.c_void_p]]:
    """Return NVML and handles of all GPUs of the machine, in its order; none without a driver that answers."""
    try:
        nvml = load(_LIBRARY)
    except OSError:
        return None, []
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return nvml, []
    handles = [ctypes.c_void_p() for _ in range(count.value)]
    return nvml, [
        each for index, each in enumerate(handles) if not nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(each))
    ]


def cores_by_gpu(load: Callable[[str], Any] = ctypes.CDLL) -> list[frozenset[int]]:
    """Return the cores of each GPU's NUMA node, by the GPU's number; none where the driver does not say."""
    nvml, devices = open_gpus(load)
    words = (ctypes.c_ulong * (_MAX_CORES // _WORD_BITS))()
    found = []
    for device in devices:
        try:
            is_known = not nvml.nvmlDeviceGetCpuAffinity(device, len(words), words)
        except AttributeError:  # a driver without it
            is_known = False
        bits = enumerate(words) if is_known else ()
        found.append(
            frozenset(_WORD_BITS * i + bit for i, word in bits for bit in range(_WORD_BITS) if word >> bit & 1)
        )
    return found


def share_of_near_cores(gpus: Sequence[int], near: Sequence[frozenset[int]], cores: Sequence[int]) -> list[int]:
    """Return the cores of a process that computes on these GPUs: near them, and of no other GPU's process.

    Args:
        gpus: numbers of its GPUs.
        near: cores near each GPU of the machine.
        cores: that this process may use, ascending.
    Returns: ascending; none if the machine's GPUs are unknown, or there are fewer cores near a GPU than GPUs.
    """
    mine: set[int] = set()
    for gpu in gpus:
        if gpu >= len(near):
            return []
        neighbours = [other for other, its_cores in enumerate(near) if its_cores == near[gpu]]
        shared = [core for core in cores if core in near[gpu]]
        count = len(shared) // len(neighbours)
        if not count:
            return []
        first = neighbours.index(gpu) * count
        mine.update(shared[first : first + count])
    return sorted(mine)
