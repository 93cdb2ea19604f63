"""Forecast the memory of a run's inference engines, and choose the share of a GPU that vLLM takes. Bytes throughout."""

from typing import Any

from coati_rl.config.config import Config
from coati_rl.config.engine_rules import sequences_at_a_time
from coati_rl.config.named_values import named_values
from coati_rl.config.plan import resolve_precision
from coati_rl.config.update_rules import engine_share, stages_on_gpu
from coati_rl.memory.activations import item_bytes
from coati_rl.memory.engine import (
    EngineSettings,
    cpu_cache_bytes,
    cpu_engine_parts,
    gpu_engine_parts,
    token_bytes,
    transformers_engine_parts,
)
from coati_rl.memory.forecast import ENGINE_RANK, ProcessMemory
from coati_rl.memory.model_shape import model_shape
from coati_rl.memory.run_memory import PYTHON_ENGINE_LIBRARIES, Machine
from coati_rl.memory.trainer import Parts
from coati_rl.memory.updates import UpdateSize, update_size
from coati_rl.transport.manifest import DEFAULT_BUCKET_BYTES
from coati_rl.transport.rendezvous import CollectiveBackend
from coati_rl.types import Device

ENGINE_LIBRARIES = 440 * 2**20  # vLLM without Ray: 570 MiB, less a cache of 128; as those of `run_memory`
_CPU_BLOCK_SIZE = 32  # tokens: `producer.engines.vllm_engine`


def engine_memory(
    config: Config, hf_config: Any, machine: Machine, backend: CollectiveBackend, *, sequence_tokens: int
) -> ProcessMemory:
    """Return the memory of a rank of an engine.

    Args:
        config: of the run.
        hf_config: of the policy.
        machine: the devices.
        backend: of the weight transfers.
        sequence_tokens: of each sequence, where the cache grows with them; vLLM reserves that of the longest ones.
    """
    parallel, sampling = config.parallel, config.sampling
    width, settings = parallel.producer_tensor_parallel_size, _settings(config, machine.device)
    shape = model_shape(hf_config, tensor_parallel_size=width, cuts_all=True)
    update = update_size(config, hf_config, settings.precision)
    on_gpu, utilization = machine.device == "cuda", parallel.gpu_memory_utilization
    host: Parts = {"libraries": ENGINE_LIBRARIES if sampling.backend == "vllm" else PYTHON_ENGINE_LIBRARIES}
    on_device = backend == "nccl" and stages_on_gpu(
        update.total, gpu_bytes=machine.gpu_bytes, gpu_memory_utilization=utilization
    )
    in_host_memory = not on_device and backend not in ("shm", "ipc")  # with these engines read the trainers' memory
    staged = update.total if on_device else 0
    sequence = token_bytes(hf_config, settings)
    if sampling.backend == "fake" or config.engine_urls:
        parts: Parts = {}
    elif sampling.backend == "transformers":
        parts = transformers_engine_parts(
            shape,
            settings,
            cache_bytes=sequence * sequence_tokens * sequences_at_a_time(config),
            update_bytes=staged,
        )
    elif on_gpu:
        if in_host_memory:
            staged = _commit_bytes(update, settings)
        share = None if machine.gpu_bytes is None else int(utilization * machine.gpu_bytes)
        longest = sequence * config.max_model_len
        parts = gpu_engine_parts(shape, settings, share_bytes=share, update_bytes=staged, sequence_bytes=longest)
    else:
        given = named_values(sampling.engine_arg).get("kv_cache_memory_bytes")
        cache = cpu_cache_bytes(hf_config, settings, host_bytes=machine.host_bytes) if given is None else int(given)
        parts = cpu_engine_parts(shape, settings, cache_bytes=cache)
    if on_gpu and config.takes_turns and config.lora.sent_adapter:  # the base, while the trainers have the GPU
        host["offloaded"] = parts["parameters"]
    unknown = f"weights unknown, as --quantization is {sampling.quantization}" if settings.is_quantized else ""
    return ProcessMemory(
        name=ENGINE_RANK,
        count=parallel.num_inferencer * width,
        parts=parts,
        host=host,
        shared={"staging": update.total} if in_host_memory else {},
        together=width,
        unknown=unknown,
    )


def chosen_share(config: Config, hf_config: Any, backend: CollectiveBackend, *, gpu_bytes: int) -> float:
    """Return the share of GPUs of this size for vLLM, with room for the staging of updates: see `engine_share`.

    Args:
        config: of a run on GPUs whose engine is vLLM.
        hf_config: of the policy.
        backend: of the weight transfers.
        gpu_bytes: of an engine's GPU.
    """
    settings = _settings(config, "cuda")
    shape = model_shape(hf_config, tensor_parallel_size=settings.tensor_parallel_size, cuts_all=True)
    sequences = token_bytes(hf_config, settings) * settings.max_model_len * settings.max_num_seqs
    update = update_size(config, hf_config, settings.precision)
    return engine_share(
        gpu_bytes=gpu_bytes,
        wanted_bytes=shape.num_weights * item_bytes(settings.precision) + sequences,
        update_bytes=update.total if backend == "nccl" else None,
        commit_bytes=0 if backend == "ipc" else _commit_bytes(update, settings),
    )


def _settings(config: Config, device: Device) -> EngineSettings:
    sampling = config.sampling
    return EngineSettings(
        precision=resolve_precision(config, device),
        tensor_parallel_size=config.parallel.producer_tensor_parallel_size,
        max_model_len=config.max_model_len,
        max_num_seqs=sequences_at_a_time(config) + 1,
        block_size=sampling.block_size or _CPU_BLOCK_SIZE,
        is_quantized=sampling.quantization is not None,
    )


def _commit_bytes(update: UpdateSize, settings: EngineSettings) -> int:
    """Return what a rank takes of its GPU to receive and load an update that is staged in host memory.

    That is two buckets, and a parameter before it is copied to where the model has it.
    """
    return 2 * DEFAULT_BUCKET_BYTES + update.largest // settings.tensor_parallel_size
