"""Decide which requests an engine takes. In: a request and the model's limits. Out: nothing, or the reason for a
refusal.

Checked here for all engines, so that they refuse alike; a refused request is a result with an error, not a failure.
"""

from coati_rl.types import GenerationRequest


class RequestRefusedError(ValueError):
    """This request cannot be served; others can."""


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
