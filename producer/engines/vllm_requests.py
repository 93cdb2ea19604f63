"""Collect vLLM's outputs of a request: stream partial outputs, and build the result when all samples have ended.

In: vLLM's `RequestOutput`s, of output kind FINAL_ONLY, or CUMULATIVE for a request with a stream. Out: chunks for the
stream, and the result. vLLM itself is not imported.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from coati_rl.types import Completion, FinishReason, GenerationRequest, GenerationResult
from producer.engines.token_stream import TokenStream

Decode = Callable[[Sequence[int]], str]

_FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "stop"}  # others are aborts


class RunningRequest:
    """Hold the outputs of one request that vLLM is running."""

    def __init__(self, request: GenerationRequest, stream: TokenStream | None) -> None:
        self._request = request
        self._stream = stream
        self._is_greedy = request.sampling.temperature == 0.0  # vLLM generates one sample, which is repeated
        self._num_sent: dict[int, int] = {}  # by sample: tokens sent to the stream
        self._ended: dict[int, Any] = {}  # by sample: vLLM's CompletionOutput

    def add(self, output: Any, *, policy_version: int, decode: Decode) -> GenerationResult | None:
        """Add a RequestOutput with new tokens of this policy_version. Returns: the result after the last one."""
        for sample in output.outputs:
            if self._stream is not None:
                self._send(sample, self._stream, policy_version)
            if sample.finish_reason is not None:
                self._ended[sample.index] = sample
        return self._result(decode) if output.finished else None

    def _send(self, sample: Any, stream: TokenStream, policy_version: int) -> None:
        num_sent = self._num_sent.get(sample.index, 0)
        token_ids, logprobs = sample.token_ids[num_sent:], sample.logprobs.logprobs[num_sent:]
        for index in range(self._request.num_samples) if self._is_greedy else (sample.index,):
            stream.send(index, token_ids, logprobs, policy_version)
        self._num_sent[sample.index] = num_sent + len(token_ids)

    def _result(self, decode: Decode) -> GenerationResult:
        samples = [self._ended[index] for index in sorted(self._ended)]
        if any(sample.finish_reason == "error" for sample in samples):
            return GenerationResult(request_id=self._request.request_id, error="vLLM reported an internal error")
        completions = [_completion(sample, decode) for sample in samples]
        if self._is_greedy:
            completions *= self._request.num_samples
        return GenerationResult(request_id=self._request.request_id, completions=tuple(completions))


class Outputs(list[Any]):
    """Collect the last outputs of aborted samples; has the interface of AsyncLLM's output queue."""

    put = list.append


def _completion(sample: Any, decode: Decode) -> Completion:
    token_ids = np.asarray(sample.token_ids, dtype=np.int32)
    versions = np.asarray([int(span.version) for span in sample.weight_versions or ()], dtype=np.int32)
    lengths = np.asarray([span.end - span.start for span in sample.weight_versions or ()], dtype=np.int64)
    return Completion(
        token_ids=token_ids,
        logprobs=np.asarray(sample.logprobs.logprobs, dtype=np.float32),
        policy_versions=np.repeat(versions, lengths),
        finish_reason=cast(FinishReason, _FINISH_REASONS.get(sample.finish_reason, "abort")),
        text=sample.text or decode(token_ids.tolist()),
        routes=sample.routed_experts,  # None unless vLLM was asked for them
    )
