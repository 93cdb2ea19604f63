"""Say given texts token by token, as a core of the real engine thread, for tests of what is in front of an engine."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coati_rl.types import Completion, FinishReason, GenerationRequest, GenerationResult
from producer.engines.engine_thread import ThreadedEngine
from producer.engines.stop_strings import ends_with_stop, final_text
from producer.engines.token_stream import TokenStream

Speech = Callable[[str, int], str]  # the prompt's text and the sample's seed -> what is said


@dataclass(eq=False)
class _Speaker:
    """A request that is being answered; all samples take a step at the same time."""

    request: GenerationRequest
    stream: TokenStream | None
    planned: list[list[int]]  # token ids of each sample
    said: list[list[int]] = field(default_factory=list)
    reasons: list[FinishReason | None] = field(default_factory=list)


class SpeakingCore:
    """Each step says a token of every sample of every request. After `hold_after` tokens it waits for `gate`.

    A token's log-probability is -(its id + 1) / 1000, so that whoever records another one is found out.
    """

    max_model_len = 4096

    def __init__(self, tokenizer: Any, speech: Speech) -> None:
        self.policy_version = 0
        self.vocab_size = len(tokenizer)
        self.tokenizer = tokenizer
        self.speech = speech
        self.gate = threading.Event()
        self.gate.set()
        self.hold_after = 10**9
        self.running: dict[str, _Speaker] = {}
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.max_running = 0

    def load(self) -> None:
        pass

    def add(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        self.requests.append(request)
        prompt = self.tokenizer.decode(list(request.token_ids), clean_up_tokenization_spaces=False)
        planned = []
        for index in range(request.num_samples):
            text = self.speech(prompt, request.sampling.seed + index)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            planned.append([*ids, self.tokenizer.eos_token_id])
        speaker = _Speaker(request, stream, planned, [[] for _ in planned], [None for _ in planned])
        self.running[request.request_id] = speaker
        self.max_running = max(self.max_running, len(self.running))

    def abort(self, request_id: str) -> GenerationResult | None:
        self.aborted.append(request_id)
        speaker = self.running.pop(request_id, None)
        return None if speaker is None else self._result(speaker)

    def num_running(self) -> int:
        return len(self.running)

    def step(self) -> list[GenerationResult]:
        results = []
        for name, speaker in list(self.running.items()):
            if max(map(len, speaker.said)) >= self.hold_after and not self.gate.wait(0.002):
                continue
            for index in range(len(speaker.planned)):
                if speaker.reasons[index] is None:
                    self._say(speaker, index)
            if all(speaker.reasons):
                results.append(self._result(self.running.pop(name)))
        return results

    def _say(self, speaker: _Speaker, index: int) -> None:
        said, planned, sampling = speaker.said[index], speaker.planned[index], speaker.request.sampling
        said.append(planned[len(said)])
        if speaker.stream is not None:
            speaker.stream.send(index, said[-1:], [logprob(said[-1])], self.policy_version)
        if len(said) == len(planned) or ends_with_stop(said, sampling.stop, self._decode):
            speaker.reasons[index] = "stop"
        elif len(said) == sampling.max_new_tokens:
            speaker.reasons[index] = "length"

    def _result(self, speaker: _Speaker) -> GenerationResult:
        completions = tuple(
            Completion(
                token_ids=np.array(said, dtype=np.int32),
                logprobs=np.array([logprob(each) for each in said], dtype=np.float32),
                policy_versions=np.full(len(said), self.policy_version, dtype=np.int32),
                finish_reason=reason or "abort",
                text=final_text(said, speaker.request.sampling.stop, self._decode),
            )
            for said, reason in zip(speaker.said, speaker.reasons, strict=True)
        )
        return GenerationResult(request_id=speaker.request.request_id, completions=completions)

    def _decode(self, token_ids: Any) -> str:
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def close(self) -> None:
        pass


def logprob(token: int) -> float:
    return -(token + 1) / 1000


def speaking_engine(tokenizer: Any, speech: Speech) -> tuple[ThreadedEngine, SpeakingCore]:
    core = SpeakingCore(tokenizer, speech)
    return ThreadedEngine(core), core
