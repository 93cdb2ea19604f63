"""Implement losses of preferences from their papers in NumPy, one pair or example at a time, with derivatives.

A completion is float64[T]: the policy's and the reference's log-probabilities of its tokens.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pair = tuple[float, Floats, Floats]  # value, derivatives by the tokens of the chosen and of the rejected completion


@dataclass(frozen=True)
class Completion:
    """Log-probabilities of a completion's tokens, float64[T] each, in nats."""

    policy: Floats
    reference: Floats

    @property
    def log_ratio(self) -> float:
        return math.fsum(self.policy) - math.fsum(self.reference)

    def share(self, derivative: float) -> Floats:
        """Of a derivative by the sum over tokens."""
        return np.full(len(self.policy), derivative)

    def share_of_mean(self, derivative: float) -> Floats:
        """Of a derivative by the mean over tokens."""
        return self.share(derivative / len(self.policy))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def dpo(chosen: Completion, rejected: Completion, *, beta: float, wrong: float = 0.0) -> Pair:
    """-(1 - e) log s(beta h) - e log s(-beta h): arXiv:2305.18290 eq. 7, of labels wrong with probability e."""
    x = beta * (chosen.log_ratio - rejected.log_ratio)
    value = -(1 - wrong) * math.log(sigmoid(x)) - wrong * math.log(sigmoid(-x))
    slope = beta * (sigmoid(x) - (1 - wrong))
    return value, chosen.share(slope), rejected.share(-slope)


def robust(chosen: Completion, rejected: Completion, *, beta: float, wrong: float) -> Pair:
    """((1 - e) L(w, l) - e L(l, w)) / (1 - 2e), with DPO's L: arXiv:2403.00409."""
    right, of_chosen, of_rejected = dpo(chosen, rejected, beta=beta)
    flipped, flipped_rejected, flipped_chosen = dpo(rejected, chosen, beta=beta)

    def unbiased(straight: Floats, turned: Floats) -> Floats:
        return ((1 - wrong) * straight - wrong * turned) / (1 - 2 * wrong)

    value = ((1 - wrong) * right - wrong * flipped) / (1 - 2 * wrong)
    return value, unbiased(of_chosen, flipped_chosen), unbiased(of_rejected, flipped_rejected)


def ipo(chosen: Completion, rejected: Completion, *, beta: float) -> Pair:
    """(h - 1 / (2 tau))^2, of log-ratios per token: arXiv:2310.12036 eq. 17."""
    means = [each.log_ratio / len(each.policy) for each in (chosen, rejected)]
    away = means[0] - means[1] - 1 / (2 * beta)
    return away**2, chosen.share_of_mean(2 * away), rejected.share_of_mean(-2 * away)


def simpo(chosen: Completion, rejected: Completion, *, beta: float, gamma: float, wrong: float = 0.0) -> Pair:
    """-log s(beta / |w| log pi(w) - beta / |l| log pi(l) - gamma): arXiv:2405.14734 eq. 6."""
    x = beta * (np.mean(chosen.policy) - np.mean(rejected.policy)) - gamma
    value = -(1 - wrong) * math.log(sigmoid(x)) - wrong * math.log(sigmoid(-x))
    slope = beta * (sigmoid(x) - (1 - wrong))
    return value, chosen.share_of_mean(slope), rejected.share_of_mean(-slope)


def orpo(chosen: Completion, rejected: Completion, *, weight: float) -> Pair:
    """-log P(w) - lambda log s(log(odds(w) / odds(l))), P the geometric mean of its tokens: arXiv:2403.07691 eq. 6."""
    p, q = (math.exp(np.mean(each.policy)) for each in (chosen, rejected))
    x = math.log(p / (1 - p)) - math.log(q / (1 - q))
    slope = weight * (sigmoid(x) - 1)
    of_chosen = chosen.share_of_mean(-1 + slope / (1 - p))
    return -math.log(p) - weight * math.log(sigmoid(x)), of_chosen, rejected.share_of_mean(-slope / (1 - q))


def with_nll(
    oracle: Callable[..., Pair], coeff: float, chosen: Completion, rejected: Completion, **given: float
) -> Pair:
    """Add -coeff / |w| log pi(w): arXiv:2404.19733 eq. 1."""
    value, of_chosen, of_rejected = oracle(chosen, rejected, **given)
    return value - coeff * float(np.mean(chosen.policy)), of_chosen + chosen.share_of_mean(-coeff), of_rejected


def kto(
    examples: Sequence[tuple[Completion, bool]],
    mismatched: Sequence[Completion],
    *,
    beta: float,
    desirable: float,
    undesirable: float,
) -> list[tuple[float, Floats]]:
    """lambda_y - v(x, y) of each example, and its derivatives: arXiv:2402.01306 eq. 7."""
    z0 = max(0.0, math.fsum(each.log_ratio for each in mismatched) / len(mismatched))
    found = []
    for completion, is_desirable in examples:
        sign, weight = (1, desirable) if is_desirable else (-1, undesirable)
        v = sigmoid(beta * sign * (completion.log_ratio - z0))
        found.append((weight - weight * v, completion.share(-weight * sign * beta * v * (1 - v))))
    return found
