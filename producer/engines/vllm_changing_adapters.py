"""Serve adapters that come and go while vLLM runs, each by a name that stands for one version of it.

In: directories of PEFT's format, and requests that name them. The arguments of `changing_adapters` have vLLM keep room
for them. A request may have stop tokens of its own, and ask for its prompt's log-probabilities.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.errors import EngineError
from coati_rl.types import GenerationRequest
from producer.engines.admission import RequestRefusedError
from producer.engines.engine_thread import ThreadedEngine
from producer.engines.options import EngineOptions
from producer.engines.token_stream import TokenStream
from producer.engines.vllm_engine import _VllmCore

MAX_RANK = 64  # vLLM computes each adapter as one of the largest rank
_AT_A_TIME = 4  # in a step; requests of others wait
_KEPT = 64  # in host memory
_LOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestExtras:
    """Say what a request wants beside its `SamplingParams`."""

    stop_ids: Collection[int]
    ends_at_eos: bool  # at the model's own end tokens, too
    prompt_logprobs: bool


def changing_adapters(layers: Collection[str]) -> dict[str, Any]:
    """Return the arguments of vLLM's EngineArgs, by name. `layers`: the last parts of the names, without the head's."""
    return {
        "enable_lora": True,
        "max_loras": _AT_A_TIME,
        "max_cpu_loras": _KEPT,
        "max_lora_rank": MAX_RANK,
        "lora_target_modules": sorted(layers),  # see `adapter_arguments`
        "logprobs_mode": "raw_logprobs",  # of temperature 1, before top-k and top-p
    }


class ChangingAdapters(ThreadedEngine):
    """Generate with vLLM; a request's `lora` is the name of an adapter that was added."""

    def __init__(self, options: EngineOptions) -> None:
        """Start loading; see `ThreadedEngine.wait_ready`. `options`: with `changing_adapters`."""
        self.core = _Core(options)
        super().__init__(self.core)

    def add(self, name: str, directory: Path) -> None:
        """Load an adapter between two steps. Raises: EngineError."""
        until = time.monotonic() + _LOAD_TIMEOUT_S
        self._call(lambda: self.core.add_adapter(name, directory), until=until, what="loading an adapter")

    def remove(self, name: str) -> None:
        """Free an adapter's memory before the next step."""
        self._inbox.put(lambda: self.core.remove_adapter(name))


class _Core(_VllmCore):
    """See `EngineCore`."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self.extras: dict[str, RequestExtras] = {}  # by the request's id
        self.prompt_logprobs: dict[str, Any] = {}  # float32[P] in nats likewise, of those that want them; the first NaN
        self._num_adapters = 0  # so far

    def add_adapter(self, name: str, directory: Path) -> None:
        """Load an adapter. Raises: EngineError."""
        from vllm.lora.request import LoRARequest

        self._num_adapters += 1
        request = LoRARequest(name, self._num_adapters, str(directory))
        try:
            self._engine.add_lora(request)
        except Exception as error:
            raise EngineError(f"vLLM cannot load the adapter: {type(error).__name__}: {error}") from error
        self._loras[name] = request

    def remove_adapter(self, name: str) -> None:
        """Free an adapter's memory."""
        if (request := self._loras.pop(name, None)) is not None:
            self._engine.remove_lora(request.lora_int_id)

    def forget(self, request_id: str) -> Any:
        """Forget what a request wants. Returns: its prompt's log-probabilities; None if it did not want them."""
        self.extras.pop(request_id, None)
        return self.prompt_logprobs.pop(request_id, None)

    def add(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        if request.lora not in self._loras or request.request_id not in self.extras:
            raise RequestRefusedError("its adapter is not served any more, or it was cancelled")
        super().add(request, stream)

    def _sampling_arguments(self, request: GenerationRequest, stream: TokenStream | None) -> dict[str, Any]:
        extras = self.extras[request.request_id]
        return super()._sampling_arguments(request, stream) | {
            "stop_token_ids": list(extras.stop_ids),
            "ignore_eos": not extras.ends_at_eos,
            "prompt_logprobs": 0 if extras.prompt_logprobs else None,  # of the prompt's own tokens
        }

    def _take(self, outputs: Sequence[Any]) -> Any:
        for output in outputs:
            if output.prompt_logprobs is not None and output.request_id in self.extras:
                logprobs = np.asarray([np.nan, *output.prompt_logprobs.logprobs], np.float32)
                self.prompt_logprobs[output.request_id] = logprobs
        return super()._take(outputs)
