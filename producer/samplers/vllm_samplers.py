"""Implement Tinker's sampling part with vLLM: adapters of one base, each version published under a name of its own.

Consumes: requests of any adapter. Waits for: requests. Is unblocked by: `close`. Requests run together as vLLM puts
them, so that a sample's last bits may depend on what is beside it.
"""

import asyncio
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from coati_rl.errors import CoatiError
from coati_rl.model_files.adapted_layers import layers_of_directory
from coati_rl.model_files.adapter_files import (
    ALL_LINEAR,
    PREFIX,
    WEIGHTS_FILE,
    AdapterSpec,
    is_adapter,
    read_adapter,
    write_adapter_config,
)
from coati_rl.tinker.core import RequestError, SampledSequence, SampleRequest, SampleResult, check_prompt
from coati_rl.types import Device, GenerationRequest, SamplingParams
from producer.engines.options import EngineOptions
from producer.engines.vllm_changing_adapters import MAX_RANK, ChangingAdapters, RequestExtras, changing_adapters
from producer.served_weights import adapter_misfits

_BASE = "base"  # name of the adapter that changes nothing
_MAX_SEQUENCES = 32
_GPU_SHARE = 0.4  # of its memory: the rest is the training part's
_LOAD_TIMEOUT_S = 1800.0
_INSTEAD = "use --sampler transformers"


class VllmSamplers:
    """Implement `SamplingCore`; the process has the variables of `engine_environment`, and holds one of these."""

    def __init__(self, directory: Path, *, max_tokens: int, dtype: str = "float32", device: Device = "cpu") -> None:
        """Load the base model; see `TransformersSamplers`. Raises: EngineError."""
        self._layers = layers_of_directory(directory, (ALL_LINEAR,))
        options = EngineOptions(
            model=str(directory),
            max_model_len=max_tokens,
            max_num_seqs=_MAX_SEQUENCES,
            dtype=dtype,
            device=device,
            gpu_memory_utilization=_GPU_SHARE,
            engine_args=changing_adapters({name.rpartition(".")[2] for name in self._layers}),
        )
        self._engine = ChangingAdapters(options)
        self._engine.wait_ready(_LOAD_TIMEOUT_S)
        self._core, self.max_tokens, self.vocab_size = self._engine.core, max_tokens, self._engine.core.vocab_size
        with tempfile.TemporaryDirectory() as scratch:
            _write_zero_adapter(Path(scratch), self._layers)
            self._engine.add(_BASE, Path(scratch))

    def publish(self, sampler: str, directory: Path) -> None:
        """See `SamplingCore.publish`. Raises: RequestError for what vLLM cannot serve beside a base."""
        if not is_adapter(directory):
            raise RequestError(f"rank=0: vLLM serves adapters of one base; {_INSTEAD}")
        try:
            adapter = read_adapter(directory, "the model")
            if any(name.startswith("lm_head.") for name in adapter.shapes):
                raise RequestError(f"vLLM adds no adapter to the head; train with train_unembed=False, or {_INSTEAD}")
            if adapter.spec.rank > MAX_RANK:
                raise RequestError(f"rank={adapter.spec.rank}: vLLM has room for {MAX_RANK} here; {_INSTEAD}")
            shapes = {f"{name}.weight": shape for name, shape in self._layers.items()}
            if problem := next(adapter_misfits(adapter, shapes), None):
                raise RequestError(f"{problem}; load it on the base that it was trained on")
            self._engine.add(sampler, directory)
        except CoatiError as error:
            raise RequestError(str(error)) from error

    def withdraw(self, sampler: str) -> None:
        self._engine.remove(sampler)

    def check(self, request: SampleRequest) -> None:
        check_prompt(request, max_tokens=self.max_tokens, vocab_size=self.vocab_size)
        if request.top_k_prompt_logprobs:
            raise RequestError(f"topk_prompt_logprobs: vLLM is not asked for them; {_INSTEAD}")

    async def sample(self, request: SampleRequest) -> SampleResult:
        """See `SamplingCore.sample`. Raises: RequestError, EngineError."""
        self.check(request)
        asked = self._generation(request)
        name = asked.request_id
        self._core.extras[name] = RequestExtras(
            stop_ids=request.stop_ids or (),
            ends_at_eos=request.stop_ids is None and not request.stop_texts,
            prompt_logprobs=request.wants_prompt_logprobs,
        )
        try:
            found = await asyncio.wrap_future(self._engine.submit(asked))
        except asyncio.CancelledError:
            self._engine.abort(name)
            raise
        finally:
            prompt_logprobs = self._core.forget(name)
        if found.error:
            raise RequestError(found.error)
        sequences = [
            SampledSequence(
                token_ids=each.token_ids.tolist(),
                logprobs=each.logprobs.tolist(),
                has_stopped=each.finish_reason == "stop",
            )
            for each in found.completions
        ]
        return SampleResult(sequences=sequences, prompt_logprobs=prompt_logprobs)

    def _generation(self, request: SampleRequest) -> GenerationRequest:
        room = self.max_tokens - len(request.prompt)
        seed = np.random.SeedSequence(request.seed).generate_state(1, np.uint64)[0]  # vLLM adds a sample's number to it
        sampling = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k if request.top_k > 0 else None,
            max_new_tokens=min(request.max_tokens or room, room),
            stop=tuple(request.stop_texts),
            seed=int(seed) >> 2,
        )
        return GenerationRequest(
            request_id=uuid.uuid4().hex,
            token_ids=tuple(request.prompt),
            num_samples=request.num_samples,
            sampling=sampling,
            lora=request.sampler or _BASE,
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._engine.close)


def _write_zero_adapter(directory: Path, layers: Mapping[str, tuple[int, int]]) -> None:
    """Write an adapter that changes nothing, for requests of the base.

    Without one, vLLM on a CPU would compute them with the adapter of the last place.
    """
    layer, (num_out, num_in) = next(iter(layers.items()))
    spec = AdapterSpec(rank=1, alpha=1.0, targets=(layer.rpartition(".")[2],))
    write_adapter_config(directory, spec.as_peft(base="", has_scalar_head=False, targets=spec.targets))
    factors = {"A": torch.zeros(1, num_in), "B": torch.zeros(num_out, 1)}
    named = {f"{PREFIX}{layer}.lora_{name}.weight": each for name, each in factors.items()}
    save_file(named, directory / WEIGHTS_FILE, metadata={"format": "pt"})
