"""Provide an engine, the same model in plain transformers as reference, and a trainer's sender of weights."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from coati_rl.model_files.stored_views import stored_parameters
from coati_rl.transport.manifest import WeightManifest, build_manifest
from coati_rl.transport.wire import WeightSender
from coati_rl.types import Completion, GenerationRequest, GenerationResult, SamplingParams

TIMEOUT_S = 60.0
MAX_MODEL_LEN = 256
MAX_NUM_SEQS = 8


class Harness:
    """One engine under test. `serving` is the index of the checkpoint whose weights it should have now."""

    def __init__(
        self, engine: Any, checkpoints: Sequence[Path], *, num_ranks: int = 1, sender: WeightSender | None = None
    ) -> None:
        self.engine = engine
        self.models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in checkpoints]
        self.serving = 0
        self.checkpoint_of = {engine.version(): 0}  # by version served
        self.sender = sender or WeightSender()
        self._num_ranks = num_ranks
        self._invitation = None

    def commit_first(self, prompt: Sequence[int]) -> None:
        """Have an engine of unproven weights, of version -1, commit the same again; and sample before and after."""
        (self.before_first_commit,) = self.complete(prompt, seed=1)
        self.first_version = self.sync(0, in_flight=True)  # nothing runs
        (self.after_first_commit,) = self.complete(prompt, seed=1)

    # ---- generation ----

    def generate(self, *requests: GenerationRequest) -> dict[str, GenerationResult]:
        for one in requests:
            self.engine.submit(one)
        return {one.request_id: self.engine.result(one.request_id, TIMEOUT_S) for one in requests}

    def complete(self, prompt: Iterable[int], *, num_samples: int = 1, **sampling: Any) -> tuple[Completion, ...]:
        result = self.generate(request("only", prompt, num_samples=num_samples, **sampling))["only"]
        assert result.error is None
        return result.completions

    # ---- the oracle ----

    def logits(self, prompt: Sequence[int], completion: Completion, *, checkpoint: int | None = None) -> np.ndarray:
        """float64[T, V] of a checkpoint, the serving one by default, for each token of the completion."""
        ids = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logits = self.models[self.serving if checkpoint is None else checkpoint](ids).logits[0]
        return logits[len(prompt) - 1 : -1].double().numpy()

    def logprob_gap(self, prompt: Sequence[int], completion: Completion, *, temperature: float) -> float:
        """The largest |engine - transformers| over the completion's tokens, in nats."""
        expected = log_softmax_of(self.logits(prompt, completion) / temperature, completion.token_ids)
        return float(np.abs(expected - completion.logprobs).max())

    def kept_logprob_gap(
        self,
        prompt: Sequence[int],
        completion: Completion,
        *,
        temperature: float,
        top_k: int | None = None,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> float:
        """The same where only the most probable tokens can be sampled, whose probabilities then sum to 1."""
        gaps = []
        logits = self.logits(prompt, completion) / temperature
        for row, token, logprob in zip(logits, completion.token_ids, completion.logprobs, strict=True):
            order = np.argsort(-row)[:top_k]
            probabilities = np.exp(row[order] - row[order[0]])
            probabilities /= probabilities.sum()
            probabilities = probabilities[probabilities >= min_p * probabilities[0]]
            probabilities /= probabilities.sum()
            num_kept = min(len(probabilities), 1 + int((np.cumsum(probabilities) < top_p).sum()))
            place = order[:num_kept].tolist().index(token)
            gaps.append(abs(np.log(probabilities[place] / probabilities[:num_kept].sum()) - logprob))
        return float(max(gaps))

    def logprob_gap_by_version(
        self, prompt: Sequence[int], completion: Completion, *, temperature: float
    ) -> dict[int, float]:
        """The same for the tokens of each version, against that version's weights given all tokens before."""
        gaps = {}
        for version in np.unique(completion.policy_versions).tolist():
            logits = self.logits(prompt, completion, checkpoint=self.checkpoint_of[version]) / temperature
            difference = np.abs(log_softmax_of(logits, completion.token_ids) - completion.logprobs)
            gaps[version] = float(difference[completion.policy_versions == version].max())
        return gaps

    def probe_gap(self, token_ids: Sequence[int]) -> float:
        """The largest |engine - transformers| over a probe's tokens, in nats."""
        found = self.engine.probe(token_ids, timeout_s=TIMEOUT_S).logprobs
        with torch.no_grad():
            logits = self.models[self.serving](torch.tensor([list(token_ids)])).logits[0, :-1]
        expected = log_softmax_of(logits.double().numpy(), np.asarray(token_ids[1:]))
        assert (found.dtype, found.shape) == (np.float32, expected.shape)
        return float(np.abs(expected - found).max())

    # ---- the trainer's end ----

    def weights(self, checkpoint: int) -> list[tuple[str, torch.Tensor]]:
        """By the names of the checkpoint, which has several tensors where transformers joins experts."""
        model, saved = self.models[checkpoint], stored_parameters(self.models[checkpoint])
        return [each for name, parameter in model.named_parameters() for each in saved[name].split(parameter.data)]

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
        assert len(digests) == (1 if self._invitation.has_one_receiver else self._num_ranks)
        return version

    def commit(self, version: int, checkpoint: int, *, in_flight: bool = False) -> None:
        """`checkpoint` is what was staged as `version`."""
        self.engine.commit_weights(version, in_flight=in_flight, timeout_s=TIMEOUT_S)
        self.serving = self.checkpoint_of[version] = checkpoint

    def put_to_sleep(self) -> None:
        """As in the trainers' turn: their end of the transfers is closed before the engine leaves."""
        self.sender.close()
        self.engine.sleep(timeout_s=TIMEOUT_S)

    def sync(self, checkpoint: int, *, in_flight: bool = False) -> int:
        version = self.stage_checkpoint(checkpoint)
        self.commit(version, checkpoint, in_flight=in_flight)
        return version


def log_softmax_of(logits: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """float64[T]: the log-probability of each token under its float64[T, V] logits."""
    shifted = logits - logits.max(-1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.take_along_axis(logprobs, token_ids[:, None].astype(int), axis=-1)[:, 0]


def request(request_id: str, prompt: Iterable[int], *, num_samples: int = 1, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id,
        token_ids=tuple(prompt),
        num_samples=num_samples,
        sampling=SamplingParams(**{"max_new_tokens": 24, **sampling}),
    )
