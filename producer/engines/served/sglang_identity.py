"""Ask an SGLang server what it is."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.http_call import HttpCallError
from coati_rl.text import shorten
from coati_rl.transport.manifest import TensorEntry
from producer.engines.served.calls import ServerAnswers, ServerFacts
from producer.engines.served.server import Server
from producer.engines.served.sglang_calls import SglangCalls

_ASK_S = 60.0
_DIGEST_DIGITS = 16  # of SHA-256 on the CPU; on GPUs it has a hash of its own
_EVEN = 1e9  # a temperature at which all tokens are equally likely
_EQUAL = 1e-4  # nats
_SPARE = 8  # tokens of a context that SGLang keeps to itself
_MUST_BE_OFF = (
    "quantization",
    "speculative_algorithm",
    "enable_lora",
    "preferred_sampling_params",
    "skip_tokenizer_init",
)


def sglang_answers(
    server: Server, entries: Mapping[str, TensorEntry], *, dtype: str, max_model_len: int
) -> ServerAnswers:
    """Return what an SGLang server is, and what is wrong with it. Raises: ConfigError if it does not say.

    It tells no shapes: those of another model are noticed at the first sync, before a token is sampled for the run.
    """
    try:
        settings = server.get("/server_info", timeout_s=_ASK_S)
        facts = ServerFacts(
            num_ranks=int(settings["tp_size"]) * int(settings["pp_size"]),
            is_sglang=True,
            has_seeds=bool(settings["enable_deterministic_inference"]),
            digest_digits=_DIGEST_DIGITS if settings["device"] == "cpu" else 0,
        )
        calls = SglangCalls(server, has_seeds=facts.has_seeds)
        calls.resume()  # a run that was killed in a commit has paused it
        parameters = calls.checksums().keys()
        first, second = _highest_logprobs(server)
    except (HttpCallError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"-b {server.url}: an SGLang server that does not say what it is ({type(error).__name__}: "
            f"{shorten(error, 100)}); use SGLang 0.5.23, without --api-key and --admin-api-key, where only this run "
            "can reach it"
        ) from error
    problems = [*_setting_problems(settings, dtype=dtype, max_model_len=max_model_len)]
    if first - second > _EQUAL:
        problems.append(
            "its log-probabilities are of temperature 1, and the loss needs those of the distribution that is sampled "
            "from; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
        )
        parameters = {}.keys()
    return ServerAnswers(facts=facts, problems=problems, parameters=parameters, vocabulary=(round(math.exp(-first)),))


def _highest_logprobs(server: Server) -> tuple[float, float]:
    """Return those of the two likeliest tokens at a temperature where all of V tokens have -ln V."""
    body = {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 1, "temperature": _EVEN, "top_p": 1.0, "top_k": -1, "min_p": 0.0},
        "return_logprob": True,
        "top_logprobs_num": 2,
    }
    reply = server.post("/generate", body, timeout_s=_ASK_S)
    first, second = reply["meta_info"]["output_top_logprobs"][0]
    return float(first[0]), float(second[0])


def _setting_problems(settings: Mapping[str, Any], *, dtype: str, max_model_len: int) -> Iterator[str]:
    if settings.get("dtype") != dtype:
        yield f"it computes in {settings.get('dtype')}, the run in {dtype}; start it with --dtype {dtype}"
    if settings.get("kv_cache_dtype") != "auto":
        yield f"it keeps keys and values in {settings.get('kv_cache_dtype')}; start it without --kv-cache-dtype"
    length = settings.get("max_req_input_len")
    if not isinstance(length, int) or length < max_model_len:
        yield (
            f"its prompts have fewer than {length} tokens, and sequences of the run {max_model_len}; start it with "
            f"--context-length {max_model_len + _SPARE} or more, and as many --max-total-tokens"
        )
    for name in _MUST_BE_OFF:
        if settings.get(name):
            yield f"it has {name} {settings[name]!r}, with which it cannot be compared; start it without"
