"""Define what an inference engine is made with, of any backend.

In: the section of a configuration that has the flags of engines. Out: `EngineOptions`, which `create_engine` takes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coati_rl.config.engine_rules import EngineFlags
from coati_rl.config.named_values import named_values
from coati_rl.model_files.adapter_files import AdapterSpec
from coati_rl.types import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Settings of an engine; the fake one and transformers leave those of the cache, the GPU and vLLM unread.

    Attributes:
        model: a directory, or a hub name that is in the local cache; the fake engine does not read the weights.
        dtype: "float32" or "bfloat16".
        max_model_len: prompt and response together, in tokens.
        max_num_seqs: samples decoded at a time; others wait.
        seed: of vLLM; requests have seeds of their own.
        device: the device that the engine computes on.
        gpu_memory_utilization: fraction of the GPU's memory; CUDA only.
        kv_cache_memory_bytes: per rank; None: what max_num_seqs needs on CPU, the remaining memory on CUDA.
        block_size: tokens of a block of the cache, the unit in which prompts find their beginnings there; None: 32 on
            the CPU, vLLM's own on CUDA.
        quantization: how vLLM quantizes the weights that it loads; None: not at all.
        enforce_eager: run the model without compilation and CUDA graphs; None: on the CPU.
        adapter: what updates hold beside the model, which serves as it was loaded; None: updates hold all weights.
        adapters: directories of LoRA adapters by the name that requests give; a name never stands for two. vLLM only.
        takes_turns: it sleeps while trainers have its device.
        shares_weights: it serves a trainer's weights of the same process, see `TransformersEngine`; transformers only.
        returns_routes: completions have the experts of each token; vLLM and transformers, of mixtures of experts.
        weights_dir: where the weights for a server are written, on a disk that it shares; needed for a URL alone.
        engine_args: others of vLLM's EngineArgs, which `check_engine_args` has checked.
    """

    model: str
    max_model_len: int
    tensor_parallel_size: int = 1
    dtype: str = "float32"
    max_num_seqs: int = 64
    seed: int = 0
    device: Device = "cpu"
    gpu_memory_utilization: float = 0.85
    kv_cache_memory_bytes: int | None = None
    block_size: int | None = None
    quantization: str | None = None
    enforce_eager: bool | None = None
    adapter: AdapterSpec | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    takes_turns: bool = False
    shares_weights: bool = False
    returns_routes: bool = False
    weights_dir: str = ""
    engine_args: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def with_flags(flags: EngineFlags, **others: Any) -> "EngineOptions":
        """Return options with the flags of a section, whose names are the same in every command; `others` by name."""
        return EngineOptions(
            block_size=flags.block_size,
            quantization=flags.quantization,
            enforce_eager=flags.enforce_eager,
            engine_args=named_values(flags.engine_arg),
            **others,
        )
