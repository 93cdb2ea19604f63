"""The clipped policy gradient, token by token: how likely the policy makes a token now, against when it was sampled.

Letters: R rows, L tokens per row, r = pi / pi_old the ratio, A the advantage. Terms are minimised, so they carry a
minus sign; they are weighted and summed by the loss, which alone knows the aggregation.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0  # nats; exp(20) = 4.9e8 keeps one astray token from turning the gradient of all into inf


def masked_log_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """log pi(token) - log pi_old(token) where the mask is True, 0 elsewhere.

    Masked here and not after exp: padding may hold -inf, and 0 * inf is a NaN gradient.

    Args:
        logprobs: float32[R, L], nats; carries gradient.
        old_logprobs: float32[R, L], nats.
        loss_mask: bool[R, L].
    Returns: float32[R, L], nats.
    Raises: ValueError if shapes differ.
    """
    if not logprobs.shape == old_logprobs.shape == loss_mask.shape:
        shapes = [tuple(t.shape) for t in (logprobs, old_logprobs, loss_mask)]
        raise ValueError(f"log-probabilities and mask must have one shape, not {shapes}")
    return torch.where(loss_mask, logprobs - old_logprobs, 0.0)


def clipped_policy_terms(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate with separate bounds: -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A).

    Args:
        logprobs: float32[R, L], log pi(token) in nats; the only input that carries gradient.
        old_logprobs: float32[R, L], log-probability when the token was sampled, in nats.
        advantages: float32[R, L], without unit.
        loss_mask: bool[R, L], True on tokens that the policy sampled.
        clip_low: how far r may fall below 1 before its gradient stops, in [0, 1).
        clip_high: how far r may rise above 1, not negative.
    Returns: (float32[R, L] terms, 0 where the mask is False; float32[R, L] detached ratios, 1 where it is False).
    Raises: ValueError if shapes differ or a bound is out of range.
    Source: arXiv:1707.06347 eq. 7; clip_high > clip_low is DAPO, arXiv:2503.14476 sec. 3.1. log r is held at most at
        MAX_LOG_RATIO, where its gradient ends.
    """
    check_clip_bounds(clip_low, clip_high)
    if advantages.shape != logprobs.shape:
        raise ValueError(f"advantages have shape {tuple(advantages.shape)}, log-probabilities {tuple(logprobs.shape)}")
    ratio = torch.exp(masked_log_ratio(logprobs, old_logprobs, loss_mask).clamp(max=MAX_LOG_RATIO))
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    # Padding may hold any advantage, also NaN: it is replaced before it can reach a product.
    masked_advantages = torch.where(loss_mask, advantages, 0.0)
    return -torch.minimum(ratio * masked_advantages, clipped * masked_advantages), ratio.detach()


def check_clip_bounds(clip_low: float, clip_high: float) -> None:
    """Refuse clip bounds that no ratio can satisfy.

    Raises: ValueError if clip_low is outside [0, 1) or clip_high is negative.
    """
    if not 0 <= clip_low < 1:
        raise ValueError(f"clip_low = {clip_low} must lie in [0, 1)")
    if not clip_high >= 0:
        raise ValueError(f"clip_high = {clip_high} must not be negative")
