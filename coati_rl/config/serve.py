"""Define the configuration of `coati-rl serve`: a model that answers OpenAI's API over HTTP."""

from typing import ClassVar, Literal

from coati_rl.config.fields import Section, execution
from coati_rl.config.generate import EngineConfig, shared_field
from coati_rl.config.model import ModelConfig
from coati_rl.config.named_values import NamedValues
from coati_rl.config.sampling import SamplingConfig
from coati_rl.config.sections import JobConfig


class ServerConfig(Section):
    """Listen for requests, and ask for a key."""

    host: str = execution("127.0.0.1", "Address to listen on; another one than loopback needs --api-key.")
    port: int = execution(8000, "Port; 0 picks a free one, which is printed.", ge=0, le=65535)
    api_key: str | None = execution(
        None,
        "Key that clients must send. Other users of the machine can read it here: better set COATI_API_KEY. Default: "
        "that variable; without it, none.",
        metavar="KEY",
    )
    max_in_flight: int = execution(256, "Requests at a time; further ones are refused with 429.", ge=1)


class ServeEngineConfig(Section):
    """The inference engine of this process."""

    backend: Literal["vllm", "transformers", "fake"] = shared_field(SamplingConfig, "backend")
    device: Literal["auto", "cpu", "cuda"] = shared_field(EngineConfig, "device")
    max_model_len: int | None = execution(
        None, "Tokens of a prompt and its answer at most; default: the model's positions, at most 8192.", ge=2
    )
    max_sequences: int = execution(32, "Samples that are generated at a time.", ge=1)
    producer_tensor_parallel_size: int = shared_field(EngineConfig, "producer_tensor_parallel_size")
    gpu_memory_utilization: float = shared_field(EngineConfig, "gpu_memory_utilization")
    block_size: int | None = shared_field(EngineConfig, "block_size")
    quantization: str | None = shared_field(EngineConfig, "quantization")
    enforce_eager: bool | None = shared_field(EngineConfig, "enforce_eager")
    engine_arg: NamedValues = shared_field(EngineConfig, "engine_arg")
    tool_format: str = execution("auto", "Format in which the model writes tool calls; auto: its chat template's.")


class ServeConfig(JobConfig):
    """The settings of a served model, each validated alone; `producer.serve_command` validates them together."""

    COMMAND: ClassVar[str] = "coati-rl serve"
    SUMMARY: ClassVar[str] = "Serve a model over HTTP by OpenAI's API: chat completions, completions, models."

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    engine: ServeEngineConfig = ServeEngineConfig()
