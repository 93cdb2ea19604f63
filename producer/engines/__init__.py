"""Create generation engines, all with one protocol: vLLM, transformers, a deterministic fake, servers by URL.

In: a backend's name and its settings. Out: a loaded engine. Importing this package imports no engine library;
`create_engine` imports the one that it needs, in a process started with `engine_environment`.
"""

from typing import TYPE_CHECKING

from coati_rl.errors import ConfigError
from coati_rl.protocols import GenerationEngine
from producer.engines.environment import engine_environment
from producer.engines.options import EngineOptions

if TYPE_CHECKING:
    from producer.engines.engine_thread import ThreadedEngine

__all__ = ["EngineOptions", "create_engine", "engine_environment"]


def create_engine(
    backend: str, options: EngineOptions, *, policy_version: int = 0, load_timeout_s: float = 1800.0
) -> GenerationEngine:
    """Create an engine and wait until it has loaded.

    Args:
        backend: "vllm", "transformers" or "fake"; "fake" has the model's vocabulary, EOS and tokenizer alone. Or the
            URL of a server of vLLM or SGLang.
        options: what it is made with.
        policy_version: of the weights on disk; -1 until a commit has proven them.
        load_timeout_s: time limit of loading, in seconds.

    Raises: ConfigError for an unsupported combination, EngineError if loading fails or exceeds its time limit.
    """
    if backend != "vllm" and options.tensor_parallel_size != 1:
        raise ConfigError(
            f"--backend {backend} has no tensor parallelism: use -ptp 1 instead of {options.tensor_parallel_size}"
        )
    if options.adapter is not None and (backend not in ("vllm", "fake") or options.quantization is not None):
        raise ConfigError(
            "--lora-sync adapter: only vLLM serves adapters beside a base, and one that is not quantized; use "
            "--lora-sync merged"
        )
    if backend != "vllm" and options.adapters:
        raise ConfigError(f"--backend {backend} has no adapters: use vllm, or merge them (coati-rl merge)")
    if backend not in ("vllm", "transformers") and options.returns_routes:
        raise ConfigError(f"--router-replay with --backend {backend}: it returns no routes; use vllm or transformers")
    engine: ThreadedEngine
    if backend == "vllm":
        from producer.engines.vllm_engine import VllmEngine

        engine = VllmEngine(options, policy_version=policy_version)
    elif backend == "transformers":
        from producer.engines.transformers_engine import TransformersEngine

        engine = TransformersEngine(options, policy_version=policy_version)
    elif "://" in backend:
        from producer.engines.served.engine import ServedEngine

        engine = ServedEngine(backend, options, policy_version=policy_version)
    elif backend == "fake":
        from producer.engines.fake_engine import fake_engine_like

        engine = fake_engine_like(options, policy_version=policy_version)
    else:
        raise ConfigError(f"--backend {backend} is unknown: use vllm, transformers, fake or http://HOST:PORT")
    try:
        engine.wait_ready(load_timeout_s)
    except BaseException:
        engine.close()
        raise
    return engine
