"""Estimators of KL(policy || reference) from the sampled token alone, per token.

With D = log pi(token) - log pi_ref(token) and the token drawn from pi: k1 is unbiased and noisy, k2 biased with little
noise, k3 unbiased and never negative. GRPO uses k3.
"""

import torch
from torch import Tensor

from coati_rl.algorithms.choices import KLEstimator
from coati_rl.algorithms.ratio import MAX_LOG_RATIO, masked_log_ratio


def kl_terms(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    estimator: KLEstimator = "k3",
    clamp: float | None = None,
) -> Tensor:
    """Estimate the KL divergence token by token: k1 = D, k2 = D^2 / 2, k3 = exp(-D) + D - 1.

    Args:
        logprobs: float32[R, M], log pi(token) in nats; carries gradient.
        ref_logprobs: float32[R, M], the reference's, in nats.
        loss_mask: bool[R, M], True on tokens that count.
        estimator: "k1", "k2" or "k3".
        clamp: an estimate beyond [-clamp, clamp], in nats, is held at the bound and has no gradient; None: no bound.
    Returns: float32[R, M], nats, 0 where `loss_mask` is False. k3 ends, with its gradient, at D = -MAX_LOG_RATIO.
    Raises: ValueError if shapes differ or the estimator is unknown.
    Source: John Schulman, "Approximating KL divergence" (2020); k3 in GRPO: arXiv:2402.03300 eq. 4.
        clamp = 10 is verl's for k3 and OpenRLHF's for all three.
    """
    terms = _estimates(masked_log_ratio(logprobs, ref_logprobs, loss_mask), estimator)
    return terms if clamp is None else terms.clamp(-clamp, clamp)


def _estimates(difference: Tensor, estimator: KLEstimator) -> Tensor:
    """float32[R, M] of D, unbounded."""
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        bounded = difference.clamp(min=-MAX_LOG_RATIO)  # both terms: of one alone the gradient would turn its sign
        return torch.expm1(-bounded) + bounded
    raise ValueError(f"KL estimator {estimator!r} is unknown; use k1, k2 or k3")
