"""An engine, the same model in plain transformers as its oracle, and a trainer's end of the weight wire."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.transport.wire import WeightSender
from coati_rl.types import Completion, GenerationRequest, GenerationResult, SamplingParams

TIMEOUT_S = 60.0


class Harness:
    """One engine under test. `serving` is the index of the checkpoint whose weights it should have now."""

    def __init__(self, engine: Any, checkpoints: Sequence[Path], *, num_ranks: int = 1) -> None:
        self.engine = engine
        self.models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in checkpoints]
        self.serving = 0
        self.sender = WeightSender()
        self._num_ranks = num_ranks
        self._invitation = None

    # ---- generation ----

    def generate(self, *requests: GenerationRequest) -> dict[str, GenerationResult]:
        for one in requests:
            self.engine.submit(one)
        results: dict[str, GenerationResult] = {}
        while len(results) < len(requests):
            polled = self.engine.poll(TIMEOUT_S)
            assert polled, "the engine returned nothing in time"
            results |= {result.request_id: result for result in polled}
        return results

    def complete(self, prompt: Iterable[int], *, num_samples: int = 1, **sampling: Any) -> tuple[Completion, ...]:
        result = self.generate(request("only", prompt, num_samples=num_samples, **sampling))["only"]
        assert result.error is None
        return result.completions

    # ---- the oracle ----

    def logits(self, prompt: Sequence[int], completion: Completion) -> np.ndarray:
        """float64[T, V] of the serving checkpoint, for each token of the completion."""
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = self.models[self.serving](ids).logits[0]
        return logits[len(prompt) - 1 : -1].double().numpy()

    def logprob_gap(self, prompt: Sequence[int], completion: Completion, *, temperature: float) -> float:
        """The largest |engine - transformers| over the completion's tokens, in nats."""
        scaled = self.logits(prompt, completion) / temperature
        logprobs = scaled - np.log(np.exp(scaled - scaled.max(-1, keepdims=True)).sum(-1, keepdims=True))
        logprobs -= scaled.max(-1, keepdims=True)
        expected = np.take_along_axis(logprobs, completion.token_ids[:, None].astype(int), axis=-1)[:, 0]
        return float(np.abs(expected - completion.logprobs).max())

    # ---- the trainer's end ----

    def weights(self, checkpoint: int) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter.data) for name, parameter in self.models[checkpoint].named_parameters()]

    def next_version(self) -> int:
        return self.engine.version() + 1

    def stage(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[str, ...]:
        """Send from here while the engine receives; raises what the engine raises, else what the sender does."""
        if not self.sender.is_open:
            (self._invitation,) = self.sender.open([self._num_ranks])
        with ThreadPoolExecutor(max_workers=1) as pool:
            sent = pool.submit(self.sender.send, manifest, tensors, timeout_s=TIMEOUT_S)
            try:
                digests = self.engine.stage_weights(manifest, self._invitation, timeout_s=TIMEOUT_S)
            except BaseException:
                self.sender.cancel()
                raise
            assert set(digests) == {sent.result(timeout=TIMEOUT_S)}
        return digests

    def stage_checkpoint(self, checkpoint: int) -> int:
        """Returns the version staged."""
        version = self.next_version()
        digests = self.stage(build_manifest(self.weights(checkpoint), policy_version=version), self.weights(checkpoint))
        assert len(digests) == self._num_ranks
        return version

    def sync(self, checkpoint: int) -> int:
        version = self.stage_checkpoint(checkpoint)
        self.engine.commit_weights(version)
        self.serving = checkpoint
        return version


def request(request_id: str, prompt: Iterable[int], *, num_samples: int = 1, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        token_ids=tuple(prompt),
        num_samples=num_samples,
        sampling=SamplingParams(**{"max_new_tokens": 24, **sampling}),
    )
