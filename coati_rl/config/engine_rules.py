"""Check the settings of inference engines: those without effect, and those that an engine's device does not allow.

Names and types of --engine-arg are vLLM's; see `producer.engines.vllm_arguments`.
"""

import json
from collections.abc import Collection, Iterator
from operator import itemgetter
from typing import Any

from coati_rl.config.config import Config
from coati_rl.config.generate import EngineConfig
from coati_rl.config.model import ROUTED
from coati_rl.config.named_values import named_values
from coati_rl.config.plan import resolve_precision
from coati_rl.config.sampling import SamplingConfig
from coati_rl.config.serve import ServeEngineConfig
from coati_rl.config.server_rules import join_problems, server_problems
from coati_rl.errors import ConfigError
from coati_rl.types import Device

EngineFlags = SamplingConfig | EngineConfig | ServeEngineConfig
_HALF_CACHES = ("auto", "bfloat16", "float16")  # that keep keys and values as a bfloat16 model computes them


def sequences_at_a_time(config: Config) -> int:
    """Return the samples that an engine decodes at a time; others of those in flight wait in it."""
    return config.sampling.max_num_seqs or config.sequences_in_flight


def answers_per_prompt(config: Config) -> int:
    """Return the answers to a training prompt: its samples, and the greedy one that they are compared with, if any."""
    return config.sequences_in_flight // config.parallel.inference_microbatch_size


def engine_problems(config: Config) -> Iterator[str]:
    """Return why the engines of a run cannot be made like this, each with a remedy."""
    yield from server_problems(config)
    yield from join_problems(config)
    parallel = config.parallel
    engines, width, trainers = parallel.num_inferencer, parallel.producer_tensor_parallel_size, parallel.num_trainers
    if parallel.colocate and engines * width > trainers:
        yield (
            f"--colocate with -i {engines} of -ptp {width} and -t {trainers}: engines have the trainers' devices, and "
            f"{engines * width} are more than {trainers}; use -i {max(1, trainers // width)}, or -t {engines * width}"
        )
    sampling, wanted = config.sampling, config.sampling.max_num_seqs
    per_prompt, of_prompt = answers_per_prompt(config), "(g + 1)" if config.algorithm.has_baseline else "g"
    # A prompt of partial rollouts begins as soon as one sample has ended.
    extra, of_extra = (per_prompt - 1, f" + {of_prompt} - 1") if config.sync.partial_rollouts else (0, "")
    largest, of_largest = max((per_prompt, of_prompt), (sampling.eval_samples, "eval-samples"), key=itemgetter(0))
    most = config.parallel.inference_microbatch_size * largest + extra
    if wanted is not None and wanted > most:
        yield (
            f"--max-num-seqs {wanted}: has no effect, as at most imbs * {of_largest}{of_extra} = {most} samples are in "
            f"flight; use -imbs {-(-(wanted - extra) // largest)}, or leave it out"
        )


def check_engine_device(settings: EngineFlags, device: Device, *, max_model_len: int, max_num_seqs: int) -> None:
    """Raise ConfigError for what vLLM, as it is run on this device, does not take.

    Args:
        settings: of the engine.
        device: of the engine.
        max_model_len: tokens of the longest sequence.
        max_num_seqs: samples that are decoded at a time.
    """
    arguments = named_values(settings.engine_arg)
    budget = arguments.get("max_num_batched_tokens")
    if isinstance(budget, int) and budget <= max_num_seqs:
        raise ConfigError(
            f"--engine-arg max_num_batched_tokens={budget}: a step computes a token of each of {max_num_seqs} samples, "
            f"and of a probe of new weights; use {max_num_seqs + 1} or more, or --max-num-seqs {max(1, budget - 1)}"
        )
    if device != "cpu":
        if arguments.get("kv_cache_memory_bytes") is not None:
            raise ConfigError(
                "--engine-arg kv_cache_memory_bytes: on GPUs the cache has what weights leave of "
                "--gpu-memory-utilization; use that flag"
            )
        return
    # The threshold cuts prompts without chunked prefill too, unless a request is alone.
    for name in ("enable_chunked_prefill", "long_prefill_token_threshold"):
        if arguments.get(name):
            raise ConfigError(
                f"--engine-arg {name}={json.dumps(arguments[name])}: on the CPU vLLM cannot cut the prompt of a "
                "request with a seed; leave it out"
            )
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        budget = arguments.get(name)
        if isinstance(budget, int) and budget < max_model_len:
            raise ConfigError(
                f"--engine-arg {name}={budget}: on the CPU prompts are not cut, and a sample may have "
                f"{max_model_len} tokens; use {max_model_len} or more"
            )
    if settings.block_size is not None and settings.block_size % 32:
        raise ConfigError(
            f"--block-size {settings.block_size}: on the CPU vLLM takes multiples of 32; "
            f"use {-(-settings.block_size // 32) * 32}"
        )


def check_experts(hf_config: Any, device: Device, *, backend: str, adapters: str | None = None) -> None:
    """Raise ConfigError for a mixture of experts that vLLM does not compute on the CPU.

    Args:
        hf_config: of the model.
        device: of the engine.
        backend: of the engine.
        adapters: flag that gives the engine adapters, beside which vLLM computes experts by Triton's kernels alone.
    """
    architecture = hf_config.model_type
    if device != "cpu" or backend != "vllm" or architecture not in ROUTED:
        return
    if architecture == "deepseek_v2":
        raise ConfigError(
            f"-b vllm: on the CPU vLLM does not compute the attention of a {architecture}; use -b transformers"
        )
    if adapters is not None:
        raise ConfigError(
            f"{adapters}: on the CPU vLLM computes no adapters beside the experts of a {architecture}; merge them "
            "(--lora-sync merged, coati-rl merge)"
        )


def check_engines(config: Config, device: Device) -> None:
    """Raise ConfigError for what cannot run on the engines' device, or is sure to be stopped there."""
    check_engine_device(
        config.sampling, device, max_model_len=config.max_model_len, max_num_seqs=sequences_at_a_time(config)
    )
    sync, precision = config.sync, resolve_precision(config, device)
    flag = _quantization(config.sampling, exact_caches=_HALF_CACHES if precision == "bf16" else ("auto",))
    if flag is not None and sync.max_logprob_gap is None and sync.on_logprob_gap == "stop":
        raise ConfigError(
            f"{flag} with --precision {precision}: the log-probabilities of the engine differ by more than "
            f"{'rounding' if precision == 'bf16' else '1e-4 nats'} from the trainers', which stops the run; use "
            "--on-logprob-gap tis, or --max-logprob-gap"
        )


def check_width(config: Config, hf_config: Any) -> None:
    """Raise ConfigError unless -ptp divides the heads of the model, given by its transformers config, as vLLM asks."""
    width, heads = config.parallel.producer_tensor_parallel_size, getattr(hf_config, "num_attention_heads", None)
    if isinstance(heads, int) and heads % width:
        works = [str(each) for each in range(1, heads + 1) if heads % each == 0]
        raise ConfigError(
            f"-ptp {width}: must divide num_attention_heads {heads}; use -ptp {' or '.join(works)} "
            f"(--model {config.model.model})"
        )


def engine_warnings(config: Config) -> Iterator[str]:
    """Return what can be run, and is hardly meant."""
    flag = _quantization(config.sampling, exact_caches=_HALF_CACHES)
    if flag is not None and config.algorithm.off_policy_correction == "none" and config.sync.on_logprob_gap == "stop":
        yield (
            f"{flag}: samples come from the quantized policy, and trainers compute with another; "
            "--off-policy-correction tis corrects for it"
        )


def _quantization(settings: EngineFlags, *, exact_caches: Collection[str]) -> str | None:
    """Return the flag that quantizes the engine's weights, or its keys and values; None if there is none.

    Args:
        settings: of the engine.
        exact_caches: types of vLLM's cache that keep keys and values as the model computes them.
    """
    arguments = named_values(settings.engine_arg)
    if settings.quantization is not None:
        return f"--quantization {settings.quantization}"
    if arguments.get("quantization_config") is not None:
        return "--engine-arg quantization_config"
    cache = arguments.get("kv_cache_dtype", "auto")
    return None if cache in exact_caches else f"--engine-arg kv_cache_dtype={cache}"
