"""Forecast the memory of an inference engine's rank: weights, key-value cache, what updates need. Bytes throughout."""

from dataclasses import dataclass
from typing import Any

from coati_rl.memory.model_shape import ModelShape, head_sizes
from coati_rl.memory.trainer import Parts

_MIN_KV_CACHE_BYTES = 2**27
_LATENT = frozenset({"deepseek_v2"})  # of the architectures that are trained
_BLOCK_TOKENS = 128  # the least that is reserved beyond a sequence: tokens of its last block that it does not use


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Hold what an engine's memory depends on besides its model."""

    precision: str  # fp32 or bf16
    tensor_parallel_size: int
    max_model_len: int  # tokens of the longest sequence
    max_num_seqs: int  # decoded at a time, probes included
    block_size: int  # tokens
    is_quantized: bool = False  # when it is loaded, by a method that says how far


def token_bytes(hf_config: Any, settings: EngineSettings) -> int:
    """Return the keys and values of a token over all layers, on one rank: 2 * layers * key heads * head size.

    With multi-head latent attention both are one latent, and the part of the key that has the position, which each rank
    keeps whole: arXiv:2405.04434, 2.1.
    """
    item = 4 if settings.precision == "fp32" else 2
    if hf_config.model_type in _LATENT:
        return int(hf_config.num_hidden_layers * (hf_config.kv_lora_rank + hf_config.qk_rope_head_dim) * item)
    _, num_keys, head_dim = head_sizes(hf_config)
    per_rank = max(1, num_keys // settings.tensor_parallel_size)
    return int(2 * hf_config.num_hidden_layers * per_rank * head_dim * item)


def cpu_cache_bytes(hf_config: Any, settings: EngineSettings, *, host_bytes: int) -> int:
    """Return the key-value cache of a rank on the CPU: max_num_seqs full sequences, at most 1/4 of the memory.

    vLLM's default is nearly all of it. Of a sequence's last block up to 128 tokens may be unused.
    """
    sequence = settings.max_model_len + max(_BLOCK_TOKENS, settings.block_size)
    wanted = token_bytes(hf_config, settings) * sequence * settings.max_num_seqs
    return max(_MIN_KV_CACHE_BYTES, min(wanted, host_bytes // 4 // settings.tensor_parallel_size))


def cpu_engine_parts(shape: ModelShape, settings: EngineSettings, *, cache_bytes: int) -> Parts:
    """Return the parts of a rank on the CPU.

    Args:
        shape: of the rank's part of the model.
        settings: of the engine.
        cache_bytes: of keys and values.
    Returns: weights, with vLLM's packed copy of a tied LM head; cache; and the logits and log-probabilities of all
        sequences, float32[S, V] each.
    """
    packed_head = shape.vocabulary * shape.hidden if shape.is_tied else 0
    return {
        "parameters": _weight_bytes(shape.num_weights + packed_head, settings),
        "KV cache": cache_bytes,
        "logits": 2 * 4 * settings.max_num_seqs * shape.vocabulary * settings.tensor_parallel_size,
    }


def gpu_engine_parts(
    shape: ModelShape, settings: EngineSettings, *, share_bytes: int | None, update_bytes: int, sequence_bytes: int
) -> Parts:
    """Return the parts of a rank on a GPU, of which vLLM takes a share: what weights leave of it is the cache.

    Args:
        shape: of the rank's part of the model.
        settings: of the engine.
        share_bytes: that vLLM takes; None: of an unknown GPU, for which the cache is that of one longest sequence.
        update_bytes: of a weight update that this rank stages on its GPU, or of what a commit loads at a time.
        sequence_bytes: keys and values of a longest sequence, the least that vLLM starts with.
    """
    weights = _weight_bytes(shape.num_weights, settings)
    left = 0 if share_bytes is None else share_bytes - weights
    return {"parameters": weights, "KV cache": max(sequence_bytes, left), "staging": update_bytes}


def transformers_engine_parts(
    shape: ModelShape, settings: EngineSettings, *, cache_bytes: int, update_bytes: int = 0
) -> Parts:
    """Return the parts of plain transformers, whose cache grows with its sequences.

    Args:
        shape: of the model.
        settings: of the engine.
        cache_bytes: of keys and values of all sequences at their lengths.
        update_bytes: of a weight update that is staged on the model's GPU.
    """
    return {
        "parameters": _weight_bytes(shape.num_weights, settings),
        "KV cache": cache_bytes,
        "staging": update_bytes,
    }


def _weight_bytes(num_weights: int, settings: EngineSettings) -> int:
    """Return the bytes of weights; 0 where quantization leaves them unknown."""
    e = 4 if settings.precision == "fp32" else 2
    return 0 if settings.is_quantized else num_weights * e
