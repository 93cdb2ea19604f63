"""Decide which requests an engine accepts, and when.

In: requests, the model's limits, the serving policy_version, and whether a commit is pending. Out: requests for the
core, requests held back for a commit, or the reason for a refusal. All engines share this code, so that they behave
alike; a refused request yields a result with an error and does not end the engine.
"""

import math
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from coati_rl.config.sampling import temperature_problem
from coati_rl.types import Completion, GenerationRequest, GenerationResult
from producer.engines.token_stream import TokenStream

_MIN_SEED, _MAX_SEED = -(2**63), 2**63 - 1  # of torch's and vLLM's generators; sample i has a request's seed + i


class RequestRefusedError(ValueError):
    """Report that this request cannot be served; the engine stays usable."""


class RequestTooLongError(RequestRefusedError):
    """Report that the request's context leaves no token for an answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """Hold a request and its token stream until the core gets them."""

    request: GenerationRequest
    stream: TokenStream | None


class AdmissionQueue:
    """Hold requests back until the right weights serve; used on the engine's thread only.

    New episodes wait for a pending commit, so that it is not starved. The commit waits for the open episodes, whose
    next turns are admitted at any policy_version. A request that names no episode counts as an episode of its own.
    """

    def __init__(self) -> None:
        self._open: dict[str, None] = {}  # episodes with an admitted request, in that order
        self._held: deque[Submission] = deque()

    def admits(self, submission: Submission, *, policy_version: int, is_committing: bool) -> bool:
        """Return True if the core may have the request now; otherwise hold it until `release`."""
        request = submission.request
        if request.episode_id is not None and request.episode_id in self._open:
            return True
        if is_committing or request.min_policy_version > policy_version:
            self._held.append(submission)
            return False
        if request.episode_id is not None:
            self._open[request.episode_id] = None
        return True

    def close_episode(self, episode_id: str) -> None:
        """Remove an episode from those that commits wait for; its held requests do not open it again."""
        self._open.pop(episode_id, None)
        self._held = deque(_without_episode(one) if one.request.episode_id == episode_id else one for one in self._held)

    def open_episodes(self) -> tuple[str, ...]:
        """Return the episodes that a commit has to wait for."""
        return tuple(self._open)

    def release(self) -> list[Submission]:
        """Return all held requests in order, to be tried again."""
        held, self._held = self._held, deque()
        return list(held)

    def withdraw(self, request_id: str) -> GenerationResult | None:
        """Abort a held request. Returns: its result without tokens; None if it is not held."""
        for submission in self._held:
            if submission.request.request_id == request_id:
                self._held.remove(submission)
                return aborted_result(submission.request)
        return None


def _without_episode(submission: Submission) -> Submission:
    return replace(submission, request=replace(submission.request, episode_id=None))


def aborted_result(request: GenerationRequest) -> GenerationResult:
    """Make the result of a request that was aborted before its first token."""
    empty = Completion(
        token_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        policy_versions=np.empty(0, dtype=np.int32),
        finish_reason="abort",
        text="",
    )
    return GenerationResult(request_id=request.request_id, completions=(empty,) * request.num_samples)


def check_request(request: GenerationRequest, *, vocab_size: int, max_model_len: int) -> None:
    """Raise RequestRefusedError if the request exceeds the model's limits."""
    prompt, sampling = request.token_ids, request.sampling
    if not prompt:
        raise RequestRefusedError("the prompt is empty")
    if len(prompt) >= max_model_len:
        raise RequestTooLongError(
            f"the prompt has {len(prompt)} tokens, which leaves none of max_model_len {max_model_len} for a response"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestRefusedError(f"token id {wrong} is not in the vocabulary of {vocab_size}")
    if request.num_samples < 1 or sampling.max_new_tokens < 1:
        raise RequestRefusedError(
            f"num_samples {request.num_samples} and max_new_tokens {sampling.max_new_tokens} must be positive"
        )
    if not sampling.temperature >= 0.0 or not 0.0 < sampling.top_p <= 1.0 or (sampling.top_k or 1) < 1:
        raise RequestRefusedError(
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}: "
            "need at least 0, in (0, 1], and None or at least 1"
        )
    if problem := temperature_problem(sampling.temperature):
        raise RequestRefusedError(f"temperature {sampling.temperature:g} {problem}")
    if "" in sampling.stop:
        raise RequestRefusedError("stop: an empty text would end the response at its first token; leave it out")
    if sampling.seed is not None and not _MIN_SEED <= sampling.seed <= _MAX_SEED - request.num_samples:
        raise RequestRefusedError(f"seed {sampling.seed}: must be an integer of 64 bits")
    if not 0.0 <= sampling.min_p <= 1.0 or not 0.0 < sampling.repetition_penalty < math.inf:
        raise RequestRefusedError(
            f"min_p {sampling.min_p}, repetition_penalty {sampling.repetition_penalty}: need in [0, 1], and a finite "
            "number above 0"
        )
