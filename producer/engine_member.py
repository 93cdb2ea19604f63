"""Hold one engine for a caller that asks for completions and replaces weights by calls, without a rollout loop."""

from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import torch

from coati_rl.config import Config
from coati_rl.config.plan import resolve_dtype
from coati_rl.errors import ConfigError, EngineError
from coati_rl.protocols import GenerationEngine
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import Device, GenerationRequest
from producer.engines import EngineOptions, create_engine
from producer.engines.decoding_trial import check_decoding

_MAX_SEQUENCES = 256  # decoded at a time, where --max-num-seqs is not given
_SHARE_TIMEOUT_S = 60.0  # for the engine's thread to take references
_FIELDS = ("token_ids", "logprobs", "policy_versions", "finish_reason", "text")


class EngineMember:
    """Answer requests, and serve the weights that are sent to it."""

    def __init__(self, config: Config, device: Device, *, shares_weights: bool = False) -> None:
        """Load the engine. `shares_weights`: it serves those of `share`. Raises: ConfigError, EngineError."""
        if config.sampling.backend == "transformers":
            check_decoding(Path(config.model.model))
        self._may_sleep = device == "cpu" or config.takes_turns or config.sampling.backend != "vllm"
        options = EngineOptions.with_flags(
            config.sampling,
            model=config.model.model,
            tensor_parallel_size=config.parallel.producer_tensor_parallel_size,
            dtype=resolve_dtype(config, device),
            max_model_len=config.max_model_len,
            max_num_seqs=config.sampling.max_num_seqs or _MAX_SEQUENCES,
            seed=config.run.seed,
            device=device,
            gpu_memory_utilization=config.parallel.gpu_memory_utilization,
            adapter=config.lora.sent_adapter,
            takes_turns=config.takes_turns,
            shares_weights=shares_weights,
        )
        self._engine: GenerationEngine = create_engine(config.sampling.backend, options)

    def generate(self, requests: Sequence[GenerationRequest], timeout_s: float) -> list[list[dict[str, Any]]]:
        """Return the fields of each request's completions. Raises: EngineError."""
        futures = self._engine.submit_all(requests)
        if wait(futures, timeout_s).not_done:
            for request in requests:
                self._engine.abort(request.request_id)
            raise EngineError(f"{len(requests)} prompts were not answered within {timeout_s:g} s")
        results = [future.result() for future in futures]
        if refused := [result.error for result in results if result.error]:
            raise EngineError(f"{len(refused)} of {len(requests)} prompts are refused: {refused[0]}")
        return [[{name: getattr(each, name) for name in _FIELDS} for each in r.completions] for r in results]

    def stage(self, manifest: str, invitation: str, timeout_s: float) -> list[str]:
        """Receive an update. Returns: a digest per rank."""
        update, rendezvous = WeightManifest.from_json(manifest), Rendezvous.from_json(invitation)
        return [*self._engine.stage_weights(update, rendezvous, timeout_s=timeout_s)]

    def commit(self, policy_version: int, probe: Sequence[int], timeout_s: float) -> tuple[tuple[str, ...], np.ndarray]:
        """Serve the update. Returns: the identity of its weights on each rank, and the probe's log-probabilities."""
        identities = self._engine.commit_weights(policy_version, in_flight=False, timeout_s=timeout_s)
        return identities, self._engine.probe(probe, timeout_s=timeout_s).logprobs

    def sleep(self, timeout_s: float) -> None:
        """Give up the memory of weights and caches until the next commit."""
        if not self._may_sleep:
            raise ConfigError("an engine of vLLM sleeps on a GPU if it is made with colocate=True")
        self._engine.sleep(timeout_s=timeout_s)

    def share(self, weights: Mapping[str, torch.Tensor], policy_version: int) -> None:
        """Serve a trainer's weights of this process without copying them."""
        from producer.engines.transformers_engine import TransformersEngine

        assert isinstance(self._engine, TransformersEngine)  # noqa: S101, no other one is made with shares_weights
        self._engine.share_weights(weights, policy_version, timeout_s=_SHARE_TIMEOUT_S)

    def probe(self, probe: Sequence[int], timeout_s: float) -> np.ndarray:
        """Return the probe's log-probabilities under the serving weights, float32[T - 1] in nats."""
        return self._engine.probe(probe, timeout_s=timeout_s).logprobs

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
