"""Tell vLLM which LoRA adapters an engine serves: its arguments, and the object of each request.

vLLM keeps an adapter, and the keys and values of its prefix cache, by the id and name of the first request that gave
them: the names here are those of contents, so that none stands for two adapters.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.model_files.adapter_files import AdapterDirectory, read_adapter

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # of vLLM's LoRAConfig


def allocated_rank(rank: int) -> int | None:
    """Return the rank that vLLM allocates for adapters of this one; None: it takes none of them."""
    return next((each for each in RANKS if each >= rank), None)


def adapter_arguments(directories: Mapping[str, str], *, is_cpu: bool) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs for adapters by name; none without adapters.

    The layers are listed: with all of vLLM's, the LM head too, a request for a prompt's log-probabilities ends an
    engine on the CPU.

    On the CPU vLLM computes what has no adapter, whose place is -1, with the last place's one: that place stays empty.

    Raises: ConfigError for a rank that is larger than vLLM's largest.
    """
    if not directories:
        return {}
    adapters = [read_adapter(Path(directory), f"adapter {directory}") for directory in directories.values()]
    rank = max(adapter.spec.rank for adapter in adapters)
    allocated = allocated_rank(rank)
    if allocated is None:
        raise ConfigError(f"an adapter has rank {rank}, and vLLM takes at most {RANKS[-1]}; merge it (coati-rl merge)")
    return {
        "enable_lora": True,
        "max_loras": len(adapters) + is_cpu,
        "max_cpu_loras": len(adapters) + is_cpu,
        "max_lora_rank": allocated,
        "lora_target_modules": sorted({name for adapter in adapters for name in layer_names(adapter)}),
    }


def layer_names(adapter: AdapterDirectory) -> set[str]:
    """Return the last parts of the names of the layers that an adapter has factors for."""
    layers = {name.rpartition(".lora_")[0] for name in adapter.shapes if ".lora_" in name}
    return {layer.rpartition(".")[2] for layer in layers}


def lora_requests(directories: Mapping[str, str]) -> dict[str | None, Any]:
    """Return what vLLM's requests name adapters by, by the adapter's name."""
    if not directories:
        return {}
    from vllm.lora.request import LoRARequest

    return {
        name: LoRARequest(lora_name=name, lora_int_id=number, lora_path=directory)
        for number, (name, directory) in enumerate(directories.items(), 1)
    }
