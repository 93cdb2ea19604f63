"""Generate tokens without a model, as a pure function of seed, prompt and policy version.

It serves dry runs and tests of the code around an engine. Weight updates are received and their digests checked as in
other engines, so that the transport is tested, too; the tensors are then dropped.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import xxhash

from coati_rl.probe import ProbeAnswer
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.types import Completion, GenerationRequest, GenerationResult
from producer.engines.admission import aborted_result
from producer.engines.checkpoint import ExpectedUpdate, expect_update, find_checkpoint
from producer.engines.engine_thread import ThreadedEngine
from producer.engines.options import EngineOptions
from producer.engines.staging import StagingArea
from producer.engines.stop_strings import Decode, ends_with_stop, final_text
from producer.engines.token_stream import TokenStream

_EOS_PROBABILITY = 1 / 16  # of each token: responses are 16 tokens long on average


class FakeEngine(ThreadedEngine):
    """Return random tokens at once."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_id: int,
        max_model_len: int,
        decode: Decode | None = None,
        expected: ExpectedUpdate | None = None,
        policy_version: int = 0,
    ) -> None:
        """Create the engine, which is ready at once.

        Args:
            vocab_size: number of token ids.
            eos_token_id: ends a response.
            max_model_len: prompt and response together, in tokens.
            decode: returns the text of token ids; None: token ids as decimal numbers.
            expected: what an update must hold; None: any tensors.
            policy_version: of the initial weights.
        """
        core = _FakeCore(
            vocab_size=vocab_size,
            eos_token_id=eos_token_id,
            max_model_len=max_model_len,
            decode=decode or _decode_as_numbers,
            expected=expected,
        )
        super().__init__(core, policy_version=policy_version)


class _FakeCore:
    """Implement `EngineCore` with random tokens."""

    def __init__(
        self,
        *,
        vocab_size: int,
        eos_token_id: int,
        max_model_len: int,
        decode: Decode,
        expected: ExpectedUpdate | None,
    ) -> None:
        self.policy_version = 0
        self.identities: tuple[str, ...] = ()
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._eos_token_id = eos_token_id
        self._decode = decode
        self._expected = expected
        self._queue: dict[str, tuple[GenerationRequest, TokenStream | None]] = {}
        self._staging = StagingArea(device=torch.device("cpu"))

    def load(self) -> None:
        pass

    def add(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        self._queue[request.request_id] = request, stream

    def abort(self, request_id: str) -> GenerationResult | None:
        found = self._queue.pop(request_id, None)
        return None if found is None else aborted_result(found[0])  # a request has all its tokens or none

    def num_running(self) -> int:
        return len(self._queue)

    def step(self) -> list[GenerationResult]:
        request, stream = self._queue.pop(next(iter(self._queue)))
        completions = tuple(self._complete(request, index) for index in range(request.num_samples))
        if stream is not None:
            for index, completion in enumerate(completions):
                for token, logprob in zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True):
                    stream.send(index, [token], [logprob], self.policy_version)
        return [GenerationResult(request_id=request.request_id, completions=completions)]

    def probe(self, token_ids: tuple[int, ...], answer: Callable[[ProbeAnswer], None]) -> None:
        answer(ProbeAnswer(logprobs=np.empty(0, dtype=np.float32)))  # this engine has no log-probabilities to prove

    def _complete(self, request: GenerationRequest, index: int) -> Completion:
        sampling = request.sampling
        seed = None if sampling.temperature == 0.0 else sampling.seed + index
        key = xxhash.xxh3_64_intdigest(repr((request.token_ids, seed, self.policy_version)).encode())
        random = np.random.default_rng(key)
        limit = min(sampling.max_new_tokens, self.max_model_len - len(request.token_ids))
        token_ids: list[int] = []
        stopped = False
        while not stopped and len(token_ids) < limit:
            is_eos = random.random() < _EOS_PROBABILITY
            token_ids.append(self._eos_token_id if is_eos else int(random.integers(self.vocab_size)))
            stopped = token_ids[-1] == self._eos_token_id or ends_with_stop(token_ids, sampling.stop, self._decode)
        return Completion(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=-random.exponential(size=len(token_ids)).astype(np.float32),
            policy_versions=np.full(len(token_ids), self.policy_version, dtype=np.int32),
            finish_reason="stop" if stopped else "length",
            text=final_text(token_ids, sampling.stop, self._decode),
        )

    def start_staging(self, manifest: WeightManifest, rendezvous: Rendezvous, *, timeout_s: float) -> None:
        if self._expected is not None:
            self._expected.check(manifest)
        self._staging.start(manifest, rendezvous, timeout_s=timeout_s)

    def poll_staging(self) -> tuple[str, ...] | None:
        staged = self._staging.poll()
        return None if staged is None else (staged.digest,)

    def sleep(self) -> list[GenerationResult]:
        self._staging.release()
        return []

    def wake(self) -> None:
        pass

    def commit(self, policy_version: int) -> list[GenerationResult]:
        digest = self._staging.take().digest
        self.identities = (digest if self._expected is None else self._expected.identity(digest),)
        self.policy_version = policy_version
        return []

    def close(self) -> None:
        self._staging.close()


def fake_engine_like(options: EngineOptions, *, policy_version: int = 0) -> FakeEngine:
    """Create a fake engine with a model's vocabulary, EOS, tokenizer and tensor names, but without its weights."""
    from transformers import AutoConfig, AutoTokenizer

    directory = find_checkpoint(options.model)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return FakeEngine(
        vocab_size=AutoConfig.from_pretrained(directory).get_text_config().vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        max_model_len=options.max_model_len,
        decode=lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True)),
        expected=expect_update(directory, options.dtype, options.adapter),
        policy_version=policy_version,
    )


def _decode_as_numbers(token_ids: Sequence[int]) -> str:
    return " ".join(str(token) for token in token_ids)
