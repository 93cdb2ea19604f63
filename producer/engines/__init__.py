"""Create generation engines: vLLM, plain transformers, and a deterministic fake, all with one protocol.

In: a backend's name and its settings. Out: a loaded engine. Importing this package imports no engine library;
`create_engine` imports the one that it needs, in a process started with `engine_environment`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.protocols import GenerationEngine
from coati_rl.types import Device
from producer.engines.engine_thread import ThreadedEngine
from producer.engines.environment import engine_environment

__all__ = ["create_engine", "engine_environment"]


def create_engine(
    backend: str,
    *,
    model: str,
    max_model_len: int,
    tensor_parallel_size: int = 1,
    dtype: str = "float32",
    max_num_seqs: int = 64,
    seed: int = 0,
    device: Device = "cpu",
    gpu_memory_utilization: float = 0.85,
    kv_cache_memory_bytes: int | None = None,
    block_size: int | None = None,
    quantization: str | None = None,
    enforce_eager: bool | None = None,
    engine_args: Mapping[str, Any] = MappingProxyType({}),
    policy_version: int = 0,
    load_timeout_s: float = 1800.0,
) -> GenerationEngine:
    """Create an engine and wait until it has loaded. See `VllmEngine` for the other arguments.

    Args:
        backend: "vllm", "transformers" or "fake".
        model: a directory or a hub name; "fake" uses its vocabulary, EOS and tokenizer but not its weights.
        load_timeout_s: time limit of loading, in seconds.

    Raises: ConfigError for an unsupported combination, EngineError if loading fails or exceeds its time limit.
    """
    if backend != "vllm" and tensor_parallel_size != 1:
        raise ConfigError(
            f"--backend {backend} has no tensor parallelism: use -ptp 1 instead of {tensor_parallel_size}"
        )
    shared: dict[str, Any] = {"max_model_len": max_model_len, "dtype": dtype, "policy_version": policy_version}
    engine: ThreadedEngine
    if backend == "vllm":
        from producer.engines.vllm_engine import VllmEngine

        engine = VllmEngine(
            model,
            tensor_parallel_size=tensor_parallel_size,
            max_num_seqs=max_num_seqs,
            seed=seed,
            device=device,
            gpu_memory_utilization=gpu_memory_utilization,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            quantization=quantization,
            enforce_eager=enforce_eager,
            engine_args=engine_args,
            **shared,
        )
    elif backend == "transformers":
        from producer.engines.transformers_engine import TransformersEngine

        engine = TransformersEngine(model, max_num_seqs=max_num_seqs, device=device, **shared)
    elif backend == "fake":
        from producer.engines.fake_engine import fake_engine_like

        engine = fake_engine_like(model, **shared)
    else:
        raise ConfigError(f"--backend {backend} is unknown: use vllm, transformers or fake")
    try:
        engine.wait_ready(load_timeout_s)
    except BaseException:
        engine.close()
        raise
    return engine
