"""Decide which requests an engine takes, and when.

In: requests, the model's limits, the weights that serve, and whether a commit is pending. Out: requests for the core
now, requests held for a commit, or the reason for a refusal. Decided here for all engines, so that they behave alike;
a refused request is a result with an error, not a failure.
"""

from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from coati_rl.types import Completion, GenerationRequest, GenerationResult
from producer.engines.token_stream import TokenStream


class RequestRefusedError(ValueError):
    """This request cannot be served; others can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A request on its way to the core."""

    request: GenerationRequest
    stream: TokenStream | None


class AdmissionQueue:
    """Holds requests back while they would meet the wrong weights; used on the engine's thread only.

    A commit that waits must not be starved: new episodes wait for it. It waits for the open ones in turn, so that their
    next turns pass, whatever version they ask for. A request that names no episode is one of its own.
    """

    def __init__(self) -> None:
        self._open: dict[str, None] = {}  # episodes of which a request was admitted, in that order
        self._held: deque[Submission] = deque()

    def admits(self, submission: Submission, *, policy_version: int, is_committing: bool) -> bool:
        """True if the core may have it now; else it is held until `release`."""
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
        """Let commits wait for this episode no longer; what is held of it does not open it again."""
        self._open.pop(episode_id, None)
        self._held = deque(_on_its_own(one) if one.request.episode_id == episode_id else one for one in self._held)

    def open_episodes(self) -> tuple[str, ...]:
        """Name the episodes that a commit has to wait for."""
        return tuple(self._open)

    def release(self) -> list[Submission]:
        """Give back all that is held, in order, to be tried again."""
        held, self._held = self._held, deque()
        return list(held)

    def withdraw(self, request_id: str) -> GenerationResult | None:
        """Abort a held request: its result without a token; None if it is not held."""
        for submission in self._held:
            if submission.request.request_id == request_id:
                self._held.remove(submission)
                return aborted_result(submission.request)
        return None


def _on_its_own(submission: Submission) -> Submission:
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
    """Raise RequestRefusedError if the request lies outside of what the model can do."""
    prompt, sampling = request.token_ids, request.sampling
    if not prompt:
        raise RequestRefusedError("the prompt is empty")
    if len(prompt) >= max_model_len:
        raise RequestRefusedError(
            f"the prompt has {len(prompt)} tokens, which leaves no room for a response within {max_model_len}"
        )
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise RequestRefusedError(f"token id {wrong} is not in the vocabulary of {vocab_size}")
    if request.num_samples < 1 or sampling.max_new_tokens < 1:
        raise RequestRefusedError(
            f"num_samples {request.num_samples} and max_new_tokens {sampling.max_new_tokens} must be positive"
        )
    if sampling.temperature < 0.0 or not 0.0 < sampling.top_p <= 1.0 or (sampling.top_k or 1) < 1:
        raise RequestRefusedError(
            f"temperature {sampling.temperature}, top_p {sampling.top_p}, top_k {sampling.top_k}: "
            "need at least 0, in (0, 1], and None or at least 1"
        )
