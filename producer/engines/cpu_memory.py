"""Size the key-value cache of an engine on the CPU, where vLLM's default takes nearly all of the memory."""

import os
from typing import Any

_MIN_KV_CACHE_BYTES = 2**27


def cpu_kv_cache_bytes(engine_args: dict[str, Any]) -> int:
    """Return the bytes for max_num_seqs full sequences, at most 1/4 of the memory (vLLM's default: nearly all)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(engine_args["model"]).get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    num_kv_heads = max(1, num_kv_heads // engine_args["tensor_parallel_size"])
    item_bytes = 4 if engine_args["dtype"] == "float32" else 2
    token_bytes = 2 * config.num_hidden_layers * num_kv_heads * head_dim * item_bytes
    wanted: int = (
        token_bytes * (engine_args["max_model_len"] + max(128, engine_args["block_size"])) * engine_args["max_num_seqs"]
    )  # a block: unused tokens of a sequence's last one
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(_MIN_KV_CACHE_BYTES, min(wanted, memory // 4 // int(engine_args["tensor_parallel_size"])))
