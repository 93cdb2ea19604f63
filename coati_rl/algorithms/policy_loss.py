"""Compute policy-gradient terms per token from ratios and advantages.

Letters: R rows, M loss tokens per row, r = pi / pi_old the ratio (of a token, or of its whole sample), A the advantage.
Terms are minimised, so they carry a minus sign; the loss weighs and sums them.
"""

import math
from typing import TypedDict

import torch
from torch import Tensor

from coati_rl.algorithms.ratio import MAX_LOG_RATIO, ratio_of, sample_mean, sample_sum

_VESPO_MIN_LOG_W = math.log(1e-8)  # TRL's


class ClipBounds(TypedDict):
    """Hold the bounds of `clipped_policy_terms` and `clipped_tokens`, which must be the same."""

    clip_low: float
    clip_high: float
    clip_dual: float | None


def clipped_policy_terms(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> Tensor:
    """Compute PPO's clipped surrogate with separate bounds: -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A).

    Args:
        log_ratio: float32[R, M], log r in nats, 0 where the mask is False; the only input that carries gradient.
        advantages: float32[R, M], without unit.
        loss_mask: bool[R, M], True on tokens that the policy sampled.
        clip_low: how far r may fall below 1 before its gradient is 0, in [0, 1].
        clip_high: how far r may rise above 1, not negative.
        clip_dual: c > 1; where A < 0 the term is at most c * -A, which bounds the effect of a large r. None: no bound.
    Returns: float32[R, M], 0 where the mask is False.
    Raises: ValueError if shapes differ or a bound is out of range.
    Source: arXiv:1707.06347 eq. 7; clip_high > clip_low is DAPO, arXiv:2503.14476 sec. 3.1; the dual clip is
        arXiv:1912.09729; r of a whole sample is GSPO, arXiv:2507.18071 eq. 5.
    """
    check_bounds(clip_low, clip_high, clip_dual)
    advantages = _masked(advantages, loss_mask, log_ratio)
    ratio = ratio_of(log_ratio)
    terms = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if clip_dual is None:
        return terms
    return torch.where(advantages < 0, torch.minimum(terms, -clip_dual * advantages), terms)


def cispo_terms(
    logprobs: Tensor, log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Compute REINFORCE with a clipped importance weight: -sg(clip(r, 1 - clip_low, 1 + clip_high)) * A * log pi.

    Unlike under PPO's clip, every token keeps a gradient, which is bounded.

    Args:
        logprobs: float32[R, M], log pi(token) in nats; the only input that carries gradient.
        log_ratio: float32[R, M], log r in nats, 0 where the mask is False.
        advantages: float32[R, M], without unit.
        loss_mask: bool[R, M], True on tokens that the policy sampled.
        clip_low: r counts at least as 1 - clip_low, in [0, 1]; 1: no lower bound.
        clip_high: r counts at most as 1 + clip_high, not negative.
    Returns: float32[R, M], 0 where the mask is False.
    Raises: ValueError if shapes differ or a bound is out of range.
    Source: arXiv:2506.13585 eq. 4 and 5.
    """
    check_bounds(clip_low, clip_high, None)
    weight = ratio_of(log_ratio.detach()).clamp(1 - clip_low, 1 + clip_high)
    # Padding may hold -inf as log-probability: it is replaced before it can reach a product.
    return -weight * _masked(advantages, loss_mask, log_ratio) * torch.where(loss_mask, logprobs, 0.0)


def sapo_terms(log_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, *, positive: float, negative: float) -> Tensor:
    """Compute a surrogate with a soft gate in place of the clip: -4 / tau * sigmoid(tau * (r - 1)) * A.

    Its gradient is that of r * A at r = 1, and fades as r leaves 1: by the derivative of the sigmoid, with tau by the
    sign of A.

    Args:
        log_ratio: float32[R, M], log r in nats, 0 where the mask is False; the only input that carries gradient.
        advantages: float32[R, M], without unit.
        loss_mask: bool[R, M], True on tokens that the policy sampled.
        positive: tau where A > 0; above 0.
        negative: tau elsewhere; above 0.
    Returns: float32[R, M], 0 where the mask is False.
    Raises: ValueError if shapes differ.
    Source: arXiv:2511.20347 (SAPO).
    """
    advantages = _masked(advantages, loss_mask, log_ratio)
    tau = torch.where(advantages > 0, log_ratio.new_tensor(positive), log_ratio.new_tensor(negative))
    return -4 / tau * torch.sigmoid(tau * (ratio_of(log_ratio) - 1)) * advantages


def gmpo_terms(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """Compute the surrogate of a geometric mean of clipped ratios: -exp(mean over a sample of clipped log r) * A.

    log r is clipped from above at clip_high where A > 0, and from below at -clip_low elsewhere.

    Args:
        log_ratio: float32[R, M], log r of tokens in nats, 0 where the mask is False; the only input with gradient.
        advantages: float32[R, M], without unit.
        loss_mask: bool[R, M], True on tokens that the policy sampled.
        sample_index: int[R, M], -1 on padding.
        clip_low: bound below, in nats.
        clip_high: bound above, in nats.
    Returns: (float32[R, M] terms, 0 where the mask is False; bool[R, M], True where log r is clipped).
    Raises: ValueError if shapes differ or a bound is out of range.
    Source: arXiv:2507.20673 (GMPO).
    """
    check_bounds(clip_low, clip_high, None)
    advantages = _masked(advantages, loss_mask, log_ratio)
    is_clipped = ((advantages > 0) & (log_ratio > clip_high)) | ((advantages < 0) & (log_ratio < -clip_low))
    clipped = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    return -ratio_of(sample_mean(clipped, loss_mask, sample_index)) * advantages, is_clipped


def vespo_terms(
    logprobs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor,
    *,
    positive: tuple[float, float],
    negative: tuple[float, float],
) -> Tensor:
    """Compute REINFORCE with a soft weight of the whole sample: -sg(phi(w)) * A * log pi.

    w is the product of r over the sample, phi(w) = w^k * exp(lambda * (1 - w)), which is 1 at w = 1.

    Args:
        logprobs: float32[R, M], log pi(token) in nats; the only input that carries gradient.
        log_ratio: float32[R, M], log r of tokens in nats, 0 where the mask is False.
        advantages: float32[R, M], without unit.
        loss_mask: bool[R, M], True on tokens that the policy sampled.
        sample_index: int[R, M], -1 on padding.
        positive: k and lambda where A >= 0.
        negative: k and lambda where A < 0.
    Returns: float32[R, M], 0 where the mask is False.
    Raises: ValueError if shapes differ.
    Source: arXiv:2602.10693 (VESPO); log r and log w are bounded as in TRL.
    """
    advantages = _masked(advantages, loss_mask, log_ratio)
    bounded = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    log_w = sample_sum(bounded, loss_mask, sample_index).clamp(_VESPO_MIN_LOG_W, MAX_LOG_RATIO)
    k, rate = (torch.where(advantages < 0, negative[i], log_w.new_tensor(positive[i])) for i in (0, 1))
    weight = torch.exp(rate * (1 - log_w.exp()) + k * log_w)
    return -weight * advantages * torch.where(loss_mask, logprobs, 0.0)


def clipped_tokens(
    log_ratio: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_dual: float | None = None,
) -> Tensor:
    """Return bool[R, M], True on tokens at which `clipped_policy_terms` is a constant without gradient."""
    ratio = ratio_of(log_ratio.detach())
    stopped = ((advantages < 0) & (ratio < 1 - clip_low)) | ((advantages > 0) & (ratio > 1 + clip_high))
    if clip_dual is not None:
        stopped |= (advantages < 0) & (ratio > clip_dual)
    return stopped & loss_mask


def check_bounds(clip_low: float, clip_high: float, clip_dual: float | None) -> None:
    """Refuse clip bounds that no ratio can satisfy.

    Raises: ValueError if clip_low is outside [0, 1], clip_high is negative or clip_dual not above 1.
    """
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low = {clip_low} must lie in [0, 1]")
    if not clip_high >= 0:
        raise ValueError(f"clip_high = {clip_high} must not be negative")
    if clip_dual is not None and not clip_dual > 1:
        raise ValueError(f"clip_dual = {clip_dual} must be above 1")


def _masked(advantages: Tensor, loss_mask: Tensor, like: Tensor) -> Tensor:
    """Set advantages of padding, which may be NaN, to 0 before they reach a product."""
    if not advantages.shape == loss_mask.shape == like.shape:
        shapes = [tuple(t.shape) for t in (advantages, loss_mask, like)]
        raise ValueError(f"advantages, mask and log-ratio must have one shape, not {shapes}")
    return torch.where(loss_mask, advantages, 0.0)
