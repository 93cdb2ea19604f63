"""Compute KTO's loss of single completions, labelled desirable or undesirable, and its KL estimate.

The loss is the sum of terms over the *global* batch divided by its number of examples, so that the gradient does not
depend on the split into micro-batches and ranks. E examples.
"""

import math

import torch
from torch import Tensor

from coati_rl.algorithms.preference import check_beta


def kto_terms(
    log_ratios: Tensor,
    is_desirable: Tensor,
    kl: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Compute w_D * (1 - sigmoid(beta * (r - kl))) if desirable, w_U * (1 - sigmoid(beta * (kl - r))) if not.

    Args:
        log_ratios: float[E], r = log pi(completion) - log pi_ref(completion), summed over tokens, nats; carries
            gradient.
        is_desirable: bool[E].
        kl: float[], estimate of KL(pi || pi_ref) in nats by `kl_estimate`; its gradient is not used.
        beta: the loss aversion's scale, positive.
        desirable_weight: w_D, not negative.
        undesirable_weight: w_U, not negative; the paper wants w_D * desirable / (w_U * undesirable examples) in
            [1, 4/3].
    Returns: float[E].
    Raises: ValueError if a setting is out of its range.
    Source: arXiv:2402.01306 eq. 7, lambda_y - v(x, y) with lambda as weight.
    """
    check_beta(beta)
    check_weights(desirable_weight, undesirable_weight)
    away = beta * (log_ratios - kl.detach())
    terms = torch.sigmoid(torch.where(is_desirable, -away, away))
    return torch.where(is_desirable, desirable_weight, undesirable_weight) * terms


def kl_estimate(log_ratio_sum: float, num_samples: float) -> float:
    """Compute max(0, mean log-ratio of mismatched completions): z0, which no gradient passes through.

    Args:
        log_ratio_sum: log pi(y') - log pi_ref(y') given x, summed over tokens and mismatched samples of the *global*
            batch, nats; y' is the completion of another row.
        num_samples: number of those samples.
    Returns: nats.
    Raises: ValueError if there are none.
    Source: arXiv:2402.01306 sec. 4.2.
    """
    if not num_samples > 0:
        raise ValueError("KTO needs mismatched completions to estimate KL, and the step has none")
    return max(0.0, log_ratio_sum / num_samples)


def check_weights(desirable_weight: float, undesirable_weight: float) -> None:
    """Raise ValueError unless both weights are finite and not negative."""
    for name, weight in (("desirable_weight", desirable_weight), ("undesirable_weight", undesirable_weight)):
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"{name} = {weight} must not be negative")
