"""Read what a server replies to a request: tokens, log-probabilities, versions of weights.

In: the samples of a reply, in the form of vLLM's /inference/v1/generate. Out: `Completion`s. A reply is data of another
program: whatever does not fit is refused.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from coati_rl.types import Completion, FinishReason, GenerationRequest
from producer.engines.stop_strings import Decode, final_text
from producer.engines.token_stream import TokenStream

_NO_LOGPROB = -9999.0  # which vLLM sends in place of a number that JSON does not have
_FINISH_REASONS = {"stop": "stop", "length": "length", "repetition": "stop"}  # others are aborts


class ReplyError(Exception):
    """Report a reply that does not answer the request."""


class _Reply(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


class _Token(_Reply):
    token_id: int = Field(ge=0, lt=2**31)
    logprob: float


class _Logprobs(_Reply):
    content: list[_Token]


class _Span(_Reply):
    version: str
    start: int = Field(ge=0)
    end: int = Field(ge=0)


class _Choice(_Reply):
    index: int = Field(ge=0)
    finish_reason: str
    token_ids: list[int]
    weight_versions: list[_Span] | None = None
    logprobs: _Logprobs


def num_choices(request: GenerationRequest) -> int:
    """Return the samples that the server is asked for: one of a greedy request, whose samples are equal."""
    return 1 if request.sampling.temperature == 0.0 else request.num_samples


def read_completions(
    choices: Sequence[Any], request: GenerationRequest, *, versions: Mapping[str, int], decode: Decode
) -> tuple[Completion, ...]:
    """Return a request's completions.

    Args:
        choices: of the server's reply, one a sample, see `_Choice`.
        request: that they answer.
        versions: policy versions by the server's names of its weights; another name is refused.
        decode: of the model's tokenizer.
    Raises: ReplyError.
    """
    try:
        found = sorted(map(_Choice.model_validate, choices), key=lambda each: each.index)
    except ValueError as error:
        raise ReplyError(f"a reply without tokens and log-probabilities: {error}") from error
    if [each.index for each in found] != list(range(num_choices(request))):
        raise ReplyError(f"{len(found)} samples in place of {num_choices(request)}")
    completions = [_completion(each, request, versions, decode) for each in found]
    if len(completions) < request.num_samples:
        completions *= request.num_samples
    return tuple(completions)


def send_tokens(completion: Completion, index: int, stream: TokenStream) -> None:
    """Send a whole completion to a stream, the tokens of each policy version at a time."""
    versions = completion.policy_versions
    borders = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    for begin, end in pairwise(borders):
        part = slice(begin, end)
        if end > begin:
            logprobs = completion.logprobs[part].tolist()
            stream.send(index, completion.token_ids[part].tolist(), logprobs, int(versions[begin]))


def _completion(choice: _Choice, request: GenerationRequest, versions: Mapping[str, int], decode: Decode) -> Completion:
    logprobs = [each.logprob for each in choice.logprobs.content]
    if [each.token_id for each in choice.logprobs.content] != choice.token_ids:
        raise ReplyError("log-probabilities of other tokens than those of the sample")
    if any(value == _NO_LOGPROB or not math.isfinite(value) for value in logprobs):
        raise ReplyError("a sampled token without a log-probability")
    return Completion(
        token_ids=np.asarray(choice.token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs, dtype=np.float32),
        policy_versions=_versions(choice, versions),
        finish_reason=cast(FinishReason, _FINISH_REASONS.get(choice.finish_reason, "abort")),
        text=final_text(choice.token_ids, request.sampling.stop, decode),
    )


def _versions(choice: _Choice, versions: Mapping[str, int]) -> np.ndarray:
    """Return int32[T], the policy version of each token. Raises: ReplyError for weights that this run has not sent."""
    found, place = np.empty(len(choice.token_ids), dtype=np.int32), 0
    for span in choice.weight_versions or ():
        if span.version not in versions:
            raise ReplyError(
                f"tokens were sampled with the weights {span.version!r}, which this run has not sent: another program "
                "uses the server, or it was started again"
            )
        if span.start != place:
            raise ReplyError("weight versions that are not of all tokens")
        found[span.start : span.end] = versions[span.version]
        place = span.end
    if place != len(choice.token_ids):
        raise ReplyError(
            "weight versions that are not of all tokens; use a server of vLLM 0.32 or SGLang 0.5.23, or newer"
        )
    return found
