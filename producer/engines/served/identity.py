"""Ask a vLLM server what it is, and refuse it unless it can be the engine of a run.

In: the run's model, precision and lengths. Out: what the engine has to know of the server. Everything is asked of the
server itself: its settings, the shapes of its modules, the names of its parameters, the token ids of some texts.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.http_call import CallRefusedError, HttpCallError
from coati_rl.text import shorten
from coati_rl.transport.manifest import TensorEntry
from producer.engines.checkpoint import read_entries
from producer.engines.served.server import Server

LOADER = "producer.engines.served.loading_worker.LoadingWorker"  # for vLLM's --worker-extension-cls
_ASK_S = 60.0
_SETTINGS_S = 180.0  # the first time a server looks at its whole system
_NORM = "norm.weight"  # whose tensors no layout cuts or joins
_KEY = re.compile(r"dp\d+:pp\d+:pcp\d+:tp\d+:")
_LINEAR = re.compile(r"\((\w+)\): \w+Linear\(in_features=(\d+), output_features=(\d+)")
_VOCABULARY = re.compile(r"LogitsProcessor\(vocab_size=(\d+)")
_TEXTS = ("Solve 12 + 345 = ? Answer: \\boxed{357}.\n\n", "def f(x):\n    return [x] * 2  # ok\n", "naïve, 你好 🙂")
_NUM_SAMPLED_IDS = 64  # of the vocabulary, whose text is tokenised


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerFacts:
    """Hold what is known of a server."""

    num_ranks: int  # of its tensor parallelism
    has_loader: bool  # its workers have `LoadingWorker`


def check_server(
    server: Server, model: Path, *, dtype: str, max_model_len: int, timeout_s: float, tokenizer: Any = None
) -> ServerFacts:
    """Return what a server is.

    Args:
        server: to be asked.
        model: directory of the run's model.
        dtype: "float32" or "bfloat16", of the run's engines.
        max_model_len: prompt and response together, in tokens.
        timeout_s: within which it has to be there.
        tokenizer: of the model; None: it is loaded.
    Raises: ConfigError with the address, what is wrong and the remedy.
    """
    try:
        server.get("/health", timeout_s=timeout_s)
    except HttpCallError as error:
        raise ConfigError(
            f"-b {server.url}: no server answers there: {error}; start it, or correct the address"
        ) from error
    settings = _settings(server)
    problems = [*_setting_problems(settings, dtype=dtype, max_model_len=max_model_len)]
    problems += [*_generate_problems(server)]
    facts = ServerFacts(
        num_ranks=int(settings["parallel_config"].get("tensor_parallel_size", 1)),
        has_loader=settings["parallel_config"].get("worker_extension_cls") == LOADER,
    )
    problems += [*_model_problems(server, model, facts, settings)]
    problems += [*_tokenizer_problems(server, model, tokenizer)]
    if problems:
        raise ConfigError("\n".join(f"-b {server.url}: {problem}" for problem in problems))
    return facts


def checksums(server: Server, *, timeout_s: float) -> dict[str, set[str]]:
    """Return the SHA-256 digests that the server's ranks compute of each parameter, by name. Raises: HttpCallError."""
    found: dict[str, set[str]] = {}
    reply = server.post("/weight_checker", {"action": "checksum"}, timeout_s=timeout_s).get("checksums")
    if not isinstance(reply, dict):
        raise CallRefusedError("/weight_checker answered no checksums")
    for key, digest in reply.items():
        found.setdefault(_KEY.sub("", str(key), count=1), set()).add(str(digest))
    return found


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
        server.post("/inference/v1/generate", body, timeout_s=_ASK_S)
    except HttpCallError as error:
        yield f"it does not continue token ids ({shorten(error, 100)}); start it with --enable-scale-out"


def _model_problems(server: Server, model: Path, facts: ServerFacts, settings: Mapping[str, Any]) -> Iterator[str]:
    entries = read_entries(model)
    try:
        reply = server.post("/collective_rpc", {"method": "get_model_inspection"}, timeout_s=_ASK_S)
        modules, names = str(reply["results"][0]), checksums(server, timeout_s=60.0).keys()
    except (HttpCallError, LookupError, TypeError) as error:
        yield f"it does not say which model it serves ({shorten(error, 100)}); use vLLM 0.32"
        return
    other = f"it serves another model than {model}"
    own = {name for name in entries if name.endswith(_NORM)}
    if differ := own ^ {name for name in names if name.endswith(_NORM)}:
        yield f"{other}: {len(differ)} layers differ, such as {min(differ)}"
    vocabulary = _vocabulary(model)
    if str(vocabulary) not in (found := set(_VOCABULARY.findall(modules))):
        yield f"{other}: its vocabulary has {', '.join(found) or 'an unknown number of'} tokens, not {vocabulary}"
    if facts.num_ranks == 1 and (wrong := _differing_linear(modules, entries)):
        yield f"{other}: {wrong}"
    tied = "lm_head.weight" not in entries
    if tied and _is_cpu(settings) and not facts.has_loader:
        yield (
            "the CPU build of vLLM keeps the old output head of a model with tied embeddings when weights are loaded "
            f"again; start it with --worker-extension-cls {LOADER}, and this package on its PYTHONPATH"
        )


def _differing_linear(modules: str, entries: Mapping[str, TensorEntry]) -> str | None:
    """Return which linear module's shape is in no layer of the model; those that vLLM joins have other names."""
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, entry in entries.items():
        shapes.setdefault(name.removesuffix(".weight").rpartition(".")[2], set()).add(entry.shape)
    for name, inputs, outputs in _LINEAR.findall(modules):
        if name in shapes and (int(outputs), int(inputs)) not in shapes[name]:
            return f"its {name} is {outputs} x {inputs}"
    return None


def _vocabulary(model: Path) -> int:
    from transformers import AutoConfig

    return int(AutoConfig.from_pretrained(model).get_text_config().vocab_size)


def _tokenizer_problems(server: Server, model: Path, tokenizer: Any) -> Iterator[str]:
    if tokenizer is None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model)
    step = max(1, len(tokenizer) // _NUM_SAMPLED_IDS)
    special = "".join(map(str, tokenizer.all_special_tokens))
    for text in (*_TEXTS, special, str(tokenizer.decode(list(range(0, len(tokenizer), step))))):
        try:
            reply = server.post("/tokenize", {"prompt": text, "add_special_tokens": False}, timeout_s=_ASK_S)
        except HttpCallError as error:
            yield f"it does not tokenise ({shorten(error, 100)}); start it with the model's tokenizer"
            return
        if reply.get("tokens") != tokenizer(text, add_special_tokens=False)["input_ids"]:
            yield f"its tokenizer is not that of {model}: {shorten(repr(text), 40)} has other token ids"
            return
