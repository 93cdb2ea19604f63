"""Ask a vLLM server what it is: its settings, the shapes of its modules, the names of its parameters."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.http_call import HttpCallError
from coati_rl.text import shorten
from coati_rl.transport.manifest import TensorEntry
from producer.engines.served.calls import ServerAnswers, ServerFacts
from producer.engines.served.server import Server
from producer.engines.served.vllm_calls import VllmCalls

LOADER = "producer.engines.served.loading_worker.LoadingWorker"  # for vLLM's --worker-extension-cls
_ASK_S = 60.0
_SETTINGS_S = 180.0  # the first time a server looks at its whole system
_LINEAR = re.compile(r"\((\w+)\): \w+Linear\(in_features=(\d+), output_features=(\d+)")
_VOCABULARY = re.compile(r"LogitsProcessor\(vocab_size=(\d+)")


def vllm_answers(
    server: Server, entries: Mapping[str, TensorEntry], *, dtype: str, max_model_len: int
) -> ServerAnswers:
    """Return what a vLLM server is, and what is wrong with it. Raises: ConfigError if it does not say."""
    settings = _settings(server)
    facts = ServerFacts(
        num_ranks=int(settings["parallel_config"].get("tensor_parallel_size", 1)),
        has_loader=settings["parallel_config"].get("worker_extension_cls") == LOADER,
    )
    problems = [*_setting_problems(settings, dtype=dtype, max_model_len=max_model_len), *_generate_problems(server)]
    if "lm_head.weight" not in entries and _is_cpu(settings) and not facts.has_loader:
        problems.append(
            "the CPU build of vLLM keeps the old output head of a model with tied embeddings when weights are loaded "
            f"again; start it with --worker-extension-cls {LOADER}, and this package on its PYTHONPATH"
        )
    try:
        reply = server.post("/collective_rpc", {"method": "get_model_inspection"}, timeout_s=_ASK_S)
        modules, names = str(reply["results"][0]), VllmCalls(server).checksums().keys()
    except (HttpCallError, LookupError, TypeError) as error:
        problems.append(f"it does not say which model it serves ({shorten(error, 100)}); use vLLM 0.32")
        modules, names = "", {}.keys()
    return ServerAnswers(
        facts=facts,
        problems=problems,
        parameters=names,
        vocabulary={int(size) for size in _VOCABULARY.findall(modules)},
        differing_shapes=[*_differing_linear(modules, entries)] if facts.num_ranks == 1 else (),
    )


def _settings(server: Server) -> Mapping[str, Any]:
    try:
        found = server.get("/server_info?config_format=json", timeout_s=_SETTINGS_S).get("vllm_config")
    except HttpCallError as error:
        raise ConfigError(
            f"-b {server.url}: it does not say what it is ({shorten(error, 100)}); start vLLM's server with the "
            "environment variable VLLM_SERVER_DEV_MODE=1, where only this run can reach it"
        ) from error
    sections = ("model_config", "parallel_config", "scheduler_config", "device_config")
    if not isinstance(found, dict) or not all(isinstance(found.get(each), dict) for each in sections):
        raise ConfigError(f"-b {server.url}: its /server_info is not that of vLLM 0.32; use that version")
    return found


def _setting_problems(settings: Mapping[str, Any], *, dtype: str, max_model_len: int) -> Iterator[str]:
    model, scheduler = settings["model_config"], settings["scheduler_config"]
    if model.get("logprobs_mode") != "processed_logprobs":
        yield (
            f"its log-probabilities are {model.get('logprobs_mode')}, and the loss needs those of the distribution "
            "that is sampled from; start it with --logprobs-mode processed_logprobs"
        )
    found = str(model.get("dtype")).removeprefix("torch.")
    if found != dtype:
        yield f"it computes in {found}, the run in {dtype}; start it with --dtype {dtype}"
    length = model.get("max_model_len")
    if not isinstance(length, int) or length < max_model_len:
        yield (
            f"its sequences have {length} tokens at most, those of the run {max_model_len}; start it with "
            f"--max-model-len {max_model_len}"
        )
    if model.get("quantization") is not None:
        yield f"its weights are quantized ({model['quantization']}), so that it cannot be compared; start it without"
    if "fp8" in (cached := str((settings.get("cache_config") or {}).get("cache_dtype"))):
        yield f"it keeps keys and values in {cached}; start it without --kv-cache-dtype"
    if settings.get("lora_config") is not None or settings.get("speculative_config") is not None:
        yield "it has adapters or speculative decoding; start it without"
    if _is_cpu(settings) and scheduler.get("enable_chunked_prefill"):
        yield (
            "on the CPU vLLM cannot cut the prompt of a request with a seed; start it with --no-enable-chunked-prefill "
            f"--max-num-batched-tokens {max(4096, max_model_len)}"
        )


def _is_cpu(settings: Mapping[str, Any]) -> bool:
    return str(settings["device_config"].get("device_type", settings["device_config"].get("device"))) == "cpu"


def _generate_problems(server: Server) -> Iterator[str]:
    body = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "temperature": 0.0, "logprobs": 0}}
    try:
        server.post("/resume", timeout_s=_ASK_S)  # a run that was killed in a commit has paused it
        server.post("/inference/v1/generate", body, timeout_s=_ASK_S)
    except HttpCallError as error:
        yield f"it does not continue token ids ({shorten(error, 100)}); start it with --enable-scale-out"


def _differing_linear(modules: str, entries: Mapping[str, TensorEntry]) -> Iterator[str]:
    """Yield the first linear module whose shape no layer of the model has; those that vLLM joins have other names."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, entry in entries.items():
        shapes.setdefault(name.removesuffix(".weight").rpartition(".")[2], set()).add(entry.shape)
    for name, inputs, outputs in _LINEAR.findall(modules):
        if name in shapes and (int(outputs), int(inputs)) not in shapes[name]:
            yield f"its {name} is {outputs} x {inputs}"
            return
