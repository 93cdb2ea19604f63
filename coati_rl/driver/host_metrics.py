"""Measure, for the record of a step, what the driver's machine has left: cores, memory, the run directory's disk."""

from pathlib import Path

import psutil

from coati_rl.disk import free_bytes
from coati_rl.memory.capacity import available_bytes

_GIB = 2**30


def host_metrics(run_dir: Path) -> dict[str, float | None]:
    """Return `cpu_busy_fraction` since the last call, `memory_available_gib` and `disk_free_gib`.

    None for what the system does not say.
    """
    memory = available_bytes()
    try:
        disk: float | None = free_bytes(run_dir) / _GIB
    except OSError:
        disk = None
    return {
        "cpu_busy_fraction": psutil.cpu_percent() / 100,
        "memory_available_gib": None if memory is None else memory / _GIB,
        "disk_free_gib": disk,
    }
