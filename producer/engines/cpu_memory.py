"""Size the key-value cache of an engine on the CPU, where vLLM's default takes nearly all of the memory."""

from typing import Any

from coati_rl.memory.capacity import total_bytes
from coati_rl.memory.engine import EngineSettings, cpu_cache_bytes


def cpu_kv_cache_bytes(engine_args: dict[str, Any]) -> int:
    """Return the bytes of a rank's cache, from vLLM's arguments; the forecast of a run's memory has the same."""
    from transformers import AutoConfig

    settings = EngineSettings(
        precision="fp32" if engine_args["dtype"] == "float32" else "bf16",
        tensor_parallel_size=int(engine_args["tensor_parallel_size"]),
        max_model_len=engine_args["max_model_len"],
        max_num_seqs=engine_args["max_num_seqs"],
        block_size=engine_args["block_size"],
    )
    config = AutoConfig.from_pretrained(engine_args["model"]).get_text_config()
    return cpu_cache_bytes(config, settings, host_bytes=total_bytes())
