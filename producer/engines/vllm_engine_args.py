"""Choose vLLM's arguments for an engine, by its device and its number of ranks."""

from typing import Any

from producer.engines.options import EngineOptions
from producer.engines.vllm_served_adapters import adapter_arguments

_CPU_BLOCK_SIZE = 32  # tokens, the least there; vLLM's 128 would compute shorter prompts once for each sample
_MIN_BATCHED_TOKENS = 4096  # of a step, without chunked prefill
_GPU_BATCHED_TOKENS = 2048  # vLLM's default on GPUs, for engines that run in their caller's process


def engine_args(options: EngineOptions) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs, by name."""
    is_cpu, width = options.device == "cpu", options.tensor_parallel_size
    arguments: dict[str, Any] = {
        "model": options.model,
        "tensor_parallel_size": width,
        "distributed_executor_backend": "uni" if width == 1 else "mp",
        "dtype": options.dtype,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.max_num_seqs + 1,  # one for a probe, which must not wait for a long response
        "max_num_active_seqs": options.max_num_seqs,
        "seed": options.seed,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "producer.engines.vllm_worker.StagingWorkerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "block_size": options.block_size,
        "quantization": options.quantization,
        "enforce_eager": is_cpu if options.enforce_eager is None else options.enforce_eager,
    }
    # Other code that depends on the device: engine_environment, and vllm_worker's tied lm_head.
    if is_cpu:
        arguments["block_size"] = options.block_size or _CPU_BLOCK_SIZE
        # With chunked prefill vLLM rewinds the request's seeded generator, which CPU generators cannot do.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(_MIN_BATCHED_TOKENS, options.max_model_len, arguments["max_num_seqs"])
    else:
        arguments["enable_return_routed_experts"] = options.returns_routes  # on a CPU by `vllm_routes`
        arguments["enable_sleep_mode"] = options.takes_turns
        arguments["gpu_memory_utilization"] = options.gpu_memory_utilization
        if arguments["max_num_seqs"] > _GPU_BATCHED_TOKENS:  # a step decodes a token of each
            arguments["max_num_batched_tokens"] = arguments["max_num_seqs"]
        if width > 1:  # where nvcc is installed FlashInfer would compile the fused kernel, longer than a start may take
            arguments["compilation_config"] = {"pass_config": {"fuse_allreduce_rms": False}}
    return arguments | adapter_arguments(options.adapters, is_cpu=is_cpu) | dict(options.engine_args)
