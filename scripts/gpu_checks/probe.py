"""What this machine has, as one JSON object on the last line of standard output; a process of its own.

Importing torch, cupy or a driver may crash or hang, which must not take the whole program along.
"""

import importlib
import importlib.util
import json
import sys
from typing import Any

# That checks may need.
MODULES = (
    *("torch", "torch.nn.attention.varlen", "transformers", "pydantic", "xxhash"),
    *("cupy.cuda.runtime", "cupy.cuda.nccl"),
)
ABSENT_IS_FINE = ("ray", "vllm", "colossalai")  # reported, needed by none


def why_unavailable(module: str) -> str | None:
    """None if the module can be imported."""
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  (a broken installation raises anything; it is reported)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def nccl_version() -> int | None:
    """As NCCL counts: 22809 is 2.28.9. None if cupy has no NCCL."""
    try:
        from cupy.cuda import nccl
    except Exception:  # noqa: BLE001  (as above; `unavailable` says why)
        return None
    return int(nccl.get_version()) if getattr(nccl, "available", True) else None


def transport_backends() -> list[str]:
    """The backends of the weight wire that need a GPU and are in this tree."""
    return [name for name in ("nccl", "ipc") if importlib.util.find_spec(f"coati_rl.transport.{name}") is not None]


def probe() -> dict[str, Any]:
    """The fields of `plan.Machine`."""
    unavailable = {module: reason for module in MODULES if (reason := why_unavailable(module)) is not None}
    machine: dict[str, Any] = {"unavailable": unavailable, "gpus": [], "no_gpu": None, "torch": None, "backends": []}
    machine["absent"] = [name for name in ABSENT_IS_FINE if importlib.util.find_spec(name) is None]
    machine["nccl"] = nccl_version()
    if "torch" in unavailable:
        return machine | {"no_gpu": f"PyTorch cannot be imported ({unavailable['torch']})"}
    import torch

    machine |= {"torch": torch.__version__, "backends": transport_backends()}
    if torch.version.cuda is None:
        return machine | {"no_gpu": f"PyTorch {torch.__version__} is built without CUDA"}
    if not torch.cuda.is_available():
        return machine | {"no_gpu": f"PyTorch {torch.__version__} (CUDA {torch.version.cuda}) finds no GPU"}
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        machine["gpus"].append({"name": properties.name, "memory_bytes": properties.total_memory})
    return machine


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(probe()) + "\n")
