"""Define the configuration of `coati-rl serve`: a model that answers OpenAI's API over HTTP."""

import re
from typing import Any, ClassVar, Literal

from pydantic import field_validator

from coati_rl.config.fields import Section, execution
from coati_rl.config.generate import EngineConfig, shared_field
from coati_rl.config.model import ModelConfig
from coati_rl.config.named_values import NamedValues
from coati_rl.config.sampling import own_engine
from coati_rl.config.sections import JobConfig

_NAME = re.compile(r"[A-Za-z0-9][\w.:/-]*")


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
    adapter: tuple[str, ...] = execution(
        (),
        "LoRA adapters of the model to serve beside it, which requests choose by NAME as their model: directories in "
        "PEFT's format, checkpoints or runs.",
        metavar="NAME=PATH,...",
    )
    max_in_flight: int = execution(256, "Requests at a time; further ones are refused with 429.", ge=1)

    @field_validator("adapter", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        texts = value.split(",") if isinstance(value, str) else value or ()
        if not isinstance(texts, tuple | list) or not all(isinstance(text, str) for text in texts):
            raise ValueError("give NAME=PATH, or several with commas")
        names = [text.partition("=")[0] for text in texts]
        for text, name in zip(texts, names, strict=True):
            if not _NAME.fullmatch(name) or not text.partition("=")[2]:
                raise ValueError(f"{text!r} is no NAME=PATH; a name has letters, digits and . _ - : /")
            if names.count(name) > 1:
                raise ValueError(f"{name} is named twice; give each adapter a name of its own")
        return tuple(texts)

    @property
    def adapters(self) -> dict[str, str]:
        """Return the paths of adapters by name."""
        return {name: path for name, _, path in (text.partition("=") for text in self.adapter)}


class ServeEngineConfig(Section):
    """The inference engine of this process."""

    backend: Literal["vllm", "transformers", "fake"] = own_engine()
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
