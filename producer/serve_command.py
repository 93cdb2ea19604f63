"""Serve a model over HTTP by OpenAI's API, without episodes, until a signal.

Consumes: HTTP requests. Waits for: requests, the engine. Is unblocked by: SIGINT or SIGTERM, which end requests in
flight and the engine. It uses plain HTTP: for other machines use a TLS proxy.
"""

import hmac
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, Request

from coati_rl.config.engine_rules import check_engine_device, check_experts
from coati_rl.config.needs import need_problems
from coati_rl.config.serve import ServeConfig, ServeEngineConfig
from coati_rl.errors import ConfigError
from coati_rl.processes.http_server import ReadyServer, is_loopback, listen_as_told, server_config, url_of
from coati_rl.processes.interrupts import ended_by_signals
from coati_rl.processes.slow_phase import slow_phase
from coati_rl.protocols import GenerationEngine
from coati_rl.types import SamplingParams
from producer.engines.environment import set_engine_environment
from producer.engines.vllm_arguments import check_engine_args, check_quantization
from producer.environments.chat import ChatTemplate
from producer.gateway.app import make_app
from producer.gateway.conversations import Language, UnrecordedConversation, tool_format_or_none
from producer.gateway.engine_sample import EngineSample
from producer.gateway.episode_table import bearer_token, wrong_token
from producer.gateway.sampling_rules import SamplingRules
from producer.gateway.served_models import ServedModels
from producer.gateway.service_metrics import CountedSession, service_router
from producer.gateway.session import Session

if TYPE_CHECKING:
    from coati_rl.model_files.check import Use

API_KEY_VARIABLE = "COATI_API_KEY"
_MAX_MODEL_LEN = 8192  # tokens, by default: a longer context takes memory for each sample
_MIN_KEY_LENGTH = 16
_LOAD_TIMEOUT_S = 1800.0


def serve_model(config: ServeConfig, *, say: Callable[[str], None], is_dry_run: bool = False) -> None:
    """Load the engine and serve until a signal, which raises SystemExit(0) or KeyboardInterrupt.

    Raises: ConfigError for an invalid setting, before anything is loaded; EngineError if loading fails.
    """
    if "model" not in config.model.model_fields_set:
        raise ConfigError("--model: which model is served? coati-rl serve MODEL")
    key = _api_key(config)
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # before torch is imported
    from coati_rl.preflight.prepare_generation import engine_device
    from coati_rl.preflight.resources import checked_model_config, load_tokenizer, resolve_model, slow_precision
    from producer.engines.decoding_trial import check_decoding
    from producer.served_weights import named_models, served_weights

    engine = config.engine
    if problems := [*need_problems(config)]:
        raise ConfigError("\n".join(problems))
    check_engine_args(engine.engine_arg)
    check_quantization(engine.quantization, gets_updates=False)
    device = engine_device(engine.device, width=engine.producer_tensor_parallel_size)
    set_engine_environment(device, engine)  # before transformers is imported
    weights = served_weights(config, lambda name, flag: cast(Path, resolve_model(name, is_dry_run=False, flag=flag)))
    precision = config.model.precision or ("bf16" if device == "cuda" else "fp32")
    uses: tuple[Use, ...] = () if engine.backend == "fake" else ("sampled",)
    hf_config, of_files = checked_model_config(weights.base, *uses, precision=precision)
    length = _max_model_len(engine.max_model_len, getattr(hf_config, "max_position_embeddings", None))
    check_experts(hf_config, device, backend=engine.backend, adapters="--adapter" if weights.adapters else None)
    check_engine_device(engine, device, max_model_len=length, max_num_seqs=engine.max_sequences)
    if engine.backend == "transformers":
        check_decoding(weights.base)
    tokenizer = load_tokenizer(weights.tokenizer, needs_chat_template=False)
    language = Language(tokenizer, ChatTemplate(tokenizer), tool_format_or_none(tokenizer, engine.tool_format))
    for warning in (*of_files, *slow_precision(precision, device)):
        say(f"warning: {warning}")
    told = f"{weights.names} (engine {engine.backend}, {device}, {precision}, {length} tokens)"
    if is_dry_run:
        say(f"would serve {told}")
        return
    with (
        ended_by_signals(),
        listen_as_told(config.server.host, config.server.port, say=say, what="key, prompts and answers") as listener,
    ):
        models, adapters = named_models(weights)
        with slow_phase("the engine loads the model", say):
            loaded = _load_engine(
                engine,
                model=str(weights.base),
                dtype={"bf16": "bfloat16", "fp32": "float32"}[precision],
                max_model_len=length,
                device=device,
                adapters=adapters,
            )
        with closing(loaded):
            session = _session(config, loaded, language, models, max_new_tokens=length)
            app = _app(session, loaded, key, models)
            ready = f"serving {told} on {url_of(listener)}/v1"
            # At its end the calls in flight get 503.
            ReadyServer(server_config(app), on_ready=lambda: say(ready), on_end=session.close).run([listener])


def _load_engine(engine: ServeEngineConfig, **settings: Any) -> GenerationEngine:
    """Load the engine that the flags describe; `settings`: of `EngineOptions`."""
    from producer.engines import EngineOptions, create_engine

    options = EngineOptions.with_flags(
        engine,
        tensor_parallel_size=engine.producer_tensor_parallel_size,
        max_num_seqs=engine.max_sequences,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        **settings,
    )
    return create_engine(engine.backend, options, load_timeout_s=_LOAD_TIMEOUT_S)


def _session(
    config: ServeConfig, engine: GenerationEngine, language: Language, models: ServedModels, *, max_new_tokens: int
) -> CountedSession:
    sampling, backend = SamplingParams(max_new_tokens=max_new_tokens), config.engine.backend
    no_schema = "" if backend == "vllm" else f"-b {backend} cannot constrain answers; use -b vllm"
    return CountedSession(
        UnrecordedConversation(language),
        EngineSample(engine, sampling),
        SamplingRules(sampling=sampling, no_schema=no_schema, loras=models.loras),
        decode=language.decode,
        max_in_flight=config.server.max_in_flight,
    )


def _app(session: CountedSession, engine: GenerationEngine, key: str | None, models: ServedModels) -> FastAPI:
    def find(request: Request) -> Session:
        token = bearer_token(request)
        if key is not None and not hmac.compare_digest(token, key.encode()):
            raise wrong_token(token)
        return session

    app = make_app(find, prefix="/v1", models=models)
    app.include_router(service_router(session, engine, find))
    return app


def _api_key(config: ServeConfig) -> str | None:
    """Return the key that clients need. Raises: ConfigError for one that is too short, or missing off loopback."""
    # Taken out of the environment, so that no process that is started here inherits it.
    from_environment = os.environ.pop(API_KEY_VARIABLE, None) or None
    key, source = config.server.api_key, "--api-key"
    if key is None:
        key, source = from_environment, API_KEY_VARIABLE
    if key is not None and (len(key) < _MIN_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key):
        raise ConfigError(
            f"{source}: needs at least {_MIN_KEY_LENGTH} characters that HTTP headers allow; "
            f"export {API_KEY_VARIABLE}=\"$(python -c 'import secrets; print(secrets.token_hex(32))')\""
        )
    if key is None and not is_loopback(config.server.host):
        raise ConfigError(
            f"--host {config.server.host}: other machines could use the model without a key; set {API_KEY_VARIABLE}, "
            "or listen on 127.0.0.1"
        )
    return key


def _max_model_len(wanted: int | None, positions: int | None) -> int:
    """Return the longest context, in tokens. Raises: ConfigError if the model has fewer positions."""
    if wanted is not None and positions is not None and wanted > positions:
        raise ConfigError(f"--max-model-len {wanted}: the model has {positions} positions; use at most {positions}")
    return wanted or min(positions or _MAX_MODEL_LEN, _MAX_MODEL_LEN)
