"""Check --engine-arg and --quantization against the vLLM that is installed, without importing it, which takes seconds.

In: values by name. Out: a ConfigError for a name that vLLM lacks or that other flags decide, and for a value of a wrong
type. What vLLM takes is read from its source, since names come and go with its versions.
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coati_rl.config.named_values import named_values
from coati_rl.errors import ConfigError
from coati_rl.text import did_you_mean

_TYPES = {"bool": bool, "int": int, "float": float, "str": str}  # of values; annotations with others are vLLM's matter

_WEIGHTS = "every weight update has to fit the model as the trainers have it"
_LAYOUT = "engines are sized and placed by -i and -ptp"
_DISTRIBUTION = "training needs the log-probabilities of the distribution that was sampled from"
_ADAPTERS = "use --lora-sync adapter, with --lora-rank and --lora-targets"
_OWNED = {  # what stands in the way, by name
    "model": "use -m",
    "tokenizer": "use -m",
    "seed": "use --seed",
    "dtype": "use --precision",
    "max_model_len": "use -mpt, -mnt, --max-episode-tokens (coati-rl serve: --max-model-len)",
    "tensor_parallel_size": "use -ptp",
    "gpu_memory_utilization": "use --gpu-memory-utilization",
    "max_num_seqs": "use --max-num-seqs",
    "max_num_active_seqs": "use --max-num-seqs",
    "scheduling_policy": "requests run in their order, after a probe of new weights",
    "num_gpu_blocks_override": "use --max-num-seqs, or on the CPU kv_cache_memory_bytes",
    "block_size": "use --block-size",
    "quantization": "use --quantization",
    "enforce_eager": "use --enforce-eager or --no-enforce-eager",
    "distributed_executor_backend": _LAYOUT,
    "pipeline_parallel_size": _LAYOUT,
    "prefill_context_parallel_size": _LAYOUT,
    "decode_context_parallel_size": _LAYOUT,
    "enable_expert_parallel": _LAYOUT,
    "master_addr": _LAYOUT,
    "master_port": _LAYOUT,
    "nnodes": _LAYOUT,
    "node_rank": _LAYOUT,
    "device_ids": _LAYOUT,
    "worker_cls": "weight updates have a worker of their own",
    "worker_extension_cls": "weight updates have a worker of their own",
    "logprobs_mode": _DISTRIBUTION,
    "logits_processors": _DISTRIBUTION,
    "watermark_config": _DISTRIBUTION,
    "enable_prefix_caching": "it is on, and cleared at each weight update",
    "disable_log_stats": "the statistics are metrics.jsonl's",
    "use_tqdm_on_load": "loading is reported in logs/",
    "runner": "the model generates",
    "convert": "the model generates",
    "skip_tokenizer_init": "texts are scored by rewards",
    "load_format": _WEIGHTS,
    "hf_overrides": _WEIGHTS,
    "hf_config_path": _WEIGHTS,
    "model_weights": _WEIGHTS,
    "revision": "use -m DIRECTORY for another revision",
    "code_revision": "use -m DIRECTORY for another revision",
    "tokenizer_revision": "use -m DIRECTORY for another revision",
    "trust_remote_code": "trainers run no code of a model's directory",
    "enable_lora": _ADAPTERS,
    "max_loras": _ADAPTERS,
    "max_lora_rank": _ADAPTERS,
    "max_cpu_loras": _ADAPTERS,
    "lora_dtype": _ADAPTERS,
    "lora_target_modules": _ADAPTERS,
    "default_mm_loras": _ADAPTERS,
    "speculative_config": "weight updates do not reach a draft model",
    "spec_method": "weight updates do not reach a draft model",
    "spec_model": "weight updates do not reach a draft model",
    "spec_tokens": "weight updates do not reach a draft model",
}
# Methods for weights that are quantized in the checkpoint.
_OF_CHECKPOINTS = (
    *("awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "compressed-tensors", "quark", "moe_wna16"),
    *("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "fbgemm_fp8", "fp_quant", "humming", "torchao"),
    *("inc", "mxfp4", "gpt_oss_mxfp4", "deepseek_v4_fp8"),
)
_PREFIXES = {"data_parallel_": _LAYOUT, "enable_eplb": _LAYOUT}


def check_engine_args(texts: Sequence[str]) -> None:
    """Check NAME=VALUE texts. Raises: ConfigError with the first mistake, and the nearest name that vLLM has."""
    types = _read_engine_args()
    for name, value in named_values(texts).items():
        remedy = _OWNED.get(name) or next((why for start, why in _PREFIXES.items() if name.startswith(start)), None)
        if remedy is not None:
            raise ConfigError(f"--engine-arg {name}: cannot be set like this: {remedy}")
        if types is None:  # the machine of the engines has it
            continue
        if name not in types:
            known = [each for each in types if each not in _OWNED]
            near = did_you_mean(name, known, "its EngineArgs has the names")
            raise ConfigError(f"--engine-arg {name}: vLLM has no such argument; {near}")
        _check_type(name, value, types[name])


def check_quantization(method: str | None, *, gets_updates: bool) -> None:
    """Check a method of quantization.

    Args:
        method: of the engine's weights.
        gets_updates: trainers send it their weights, which are not quantized.
    Raises: ConfigError with the nearest one that vLLM has, or those that quantize on loading.
    """
    if method is None:
        return
    if gets_updates and method in _OF_CHECKPOINTS:
        raise ConfigError(
            f"--quantization {method}: is for checkpoints whose weights are quantized, and trainers send full "
            "ones; use a method that quantizes on loading, as fp8"
        )
    tree = _read("model_executor/layers/quantization/__init__.py")
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "QuantizationMethods":
            known = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            if method not in known:
                near = did_you_mean(method, map(str, known), f"use {', '.join(map(str, known))}")
                raise ConfigError(f"--quantization {method}: vLLM has no such method; {near}")


def _check_type(name: str, value: Any, annotation: str) -> None:
    """Refuse a value that is none of the plain types of an annotation, as a text where vLLM wants a number."""
    parts = [part.strip() for part in annotation.split("|")]
    allowed = [_TYPES[part] for part in parts if part in _TYPES]
    if len(allowed) < len([part for part in parts if part != "None"]) or type(value) in allowed:
        return
    if (value is None and "None" in parts) or (type(value) is int and float in allowed):
        return
    wanted = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
    texts = [wanted[kind] for kind in allowed] + (["null"] if "None" in parts else [])
    raise ConfigError(f"--engine-arg {name}={value}: vLLM takes {' or '.join(texts)}")


@functools.cache
def _read_engine_args() -> Mapping[str, str] | None:
    """Return the annotations of vLLM's EngineArgs by name; None where vLLM is not installed, or has another form."""
    tree = _read("engine/arg_utils.py")
    for node in tree.body if tree is not None else ():
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            names = {ast.unparse(each.target): ast.unparse(each.annotation) for each in fields}
            return {name: annotation for name, annotation in names.items() if not name.startswith("_")}
    return None


def _read(path: str) -> ast.Module | None:
    """Return the source of a file of vLLM; None if it has no such file."""
    found = importlib.util.find_spec("vllm")
    for directory in (found.submodule_search_locations or ()) if found else ():
        file = Path(directory) / path
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None
