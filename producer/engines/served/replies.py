"""Write requests for a server's /inference/v1/generate, and read what it replies: tokens, log-probabilities, versions.

In: a `GenerationRequest`. Out: `Completion`s. A reply is data of another program: whatever does not fit is refused.
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

REQUEST_PREFIX = "generate-tokens-"  # that the server puts before the ids of requests
_NO_LOGPROB = -9999.0  # which it sends in place of a number that JSON does not have
_BYTES_OF_TOKEN = 512  # of a reply, at most: 200 were seen
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


class _Generated(_Reply):
    choices: list[_Choice]


def num_choices(request: GenerationRequest) -> int:
    """Return the samples that the server is asked for: one of a greedy request, whose samples are equal."""
    return 1 if request.sampling.temperature == 0.0 else request.num_samples


def generate_body(request: GenerationRequest, request_id: str, *, max_model_len: int) -> dict[str, Any]:
    """Return the body of the POST. `request_id`: unique on the server. `max_model_len`: of the run, in tokens."""
    sampling = request.sampling
    params: dict[str, Any] = {
        "n": num_choices(request),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or 0,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "max_tokens": min(sampling.max_new_tokens, max_model_len - len(request.token_ids)),
        "stop": list(sampling.stop) or None,
        "seed": sampling.seed,  # sample i gets seed + i
        "logprobs": 0,  # of the sampled token alone
        "detokenize": bool(sampling.stop),
        "include_stop_str_in_output": True,
    }
    if request.json_schema:
        params["structured_outputs"] = {"json": request.json_schema}
    return {"request_id": request_id, "token_ids": list(request.token_ids), "sampling_params": params}


def max_reply_bytes(body: Mapping[str, Any]) -> int:
    """Return the size of the largest reply that can answer a body."""
    params = body["sampling_params"]
    return (1 << 20) + _BYTES_OF_TOKEN * int(params["n"]) * int(params["max_tokens"])


def probe_body(token_ids: Sequence[int], request_id: str) -> dict[str, Any]:
    """Return the body that asks for the log-probabilities of a prompt, without temperature, cuts and prefix cache."""
    params = {
        "n": 1,
        "max_tokens": 1,
        "temperature": 0.0,
        "prompt_logprobs": 0,
        "detokenize": False,
        "skip_reading_prefix_cache": True,
    }
    return {"request_id": request_id, "token_ids": list(token_ids), "sampling_params": params}


def read_completions(
    reply: Mapping[str, Any], request: GenerationRequest, *, versions: Mapping[str, int], decode: Decode
) -> tuple[Completion, ...]:
    """Return a request's completions.

    Args:
        reply: of the server.
        request: that it answers.
        versions: policy versions by the server's names of its weights; another name is refused.
        decode: of the model's tokenizer.
    Raises: ReplyError.
    """
    try:
        choices = sorted(_Generated.model_validate(reply).choices, key=lambda each: each.index)
    except ValueError as error:
        raise ReplyError(f"a reply without tokens and log-probabilities: {error}") from error
    if [each.index for each in choices] != list(range(num_choices(request))):
        raise ReplyError(f"{len(choices)} samples in place of {num_choices(request)}")
    completions = [_completion(each, request, versions, decode) for each in choices]
    if len(completions) < request.num_samples:
        completions *= request.num_samples
    return tuple(completions)


def read_probe(reply: Mapping[str, Any], token_ids: Sequence[int]) -> np.ndarray:
    """Return float32[T - 1], the log-probabilities of token_ids[1:]. Raises: ReplyError."""
    found = reply.get("prompt_logprobs")
    if not isinstance(found, list) or len(found) != len(token_ids):
        raise ReplyError(f"no log-probabilities of a prompt of {len(token_ids)} tokens")
    try:
        logprobs = [float(each[str(token)]["logprob"]) for each, token in zip(found[1:], token_ids[1:], strict=True)]
    except (KeyError, TypeError, ValueError) as error:
        raise ReplyError("log-probabilities of other tokens than the prompt's") from error
    return np.asarray(logprobs, dtype=np.float32)


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
        raise ReplyError("weight versions that are not of all tokens; use a vLLM server of version 0.32 or newer")
    return found
