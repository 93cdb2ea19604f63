"""Compute losses of preference pairs from the log-probabilities of whole completions.

Each function returns a term per pair. The loss is their sum over the *global* batch divided by its number of pairs, so
that the gradient does not depend on the split into micro-batches and ranks. P pairs; all inputs are of one completion
given its prompt, in nats.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# The odds p / (1 - p) of a probability above exp(this) are those of exp(this), without gradient: float32 rounds the
# log-probability of a sure token to 0, whose odds are infinite.
MAX_MEAN_LOGPROB = -1e-7  # nats per token


def dpo_terms(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: float, label_smoothing: float = 0.0
) -> Tensor:
    """Compute DPO: -(1 - e) * log sigmoid(beta * h) - e * log sigmoid(-beta * h), with h = chosen - rejected log-ratio.

    Args:
        chosen_log_ratios: float[P], log pi(chosen) - log pi_ref(chosen), summed over tokens; carries gradient.
        rejected_log_ratios: float[P], the same of the rejected completion; carries gradient.
        beta: weight of the KL constraint to the reference, positive.
        label_smoothing: e, the assumed probability that a pair's label is wrong, in [0, 0.5); above 0 it is
            conservative DPO.
    Returns: float[P].
    Raises: ValueError if a setting is out of its range.
    Source: arXiv:2305.18290 eq. 7; label smoothing (cDPO): Eric Mitchell, "A note on DPO with noisy preferences &
        relationship to IPO" (2023).
    """
    check_beta(beta)
    check_label_smoothing(label_smoothing)
    return _smoothed(beta * (chosen_log_ratios - rejected_log_ratios), label_smoothing)


def robust_dpo_terms(
    chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: float, label_smoothing: float
) -> Tensor:
    """Compute robust DPO: (-(1 - e) * log sigmoid(beta * h) + e * log sigmoid(-beta * h)) / (1 - 2 * e).

    Its expectation over labels that are flipped with probability e is DPO's loss on the right labels.

    Args:
        chosen_log_ratios: float[P], log pi(chosen) - log pi_ref(chosen), summed over tokens; carries gradient.
        rejected_log_ratios: float[P], the same of the rejected completion; carries gradient.
        beta: weight of the KL constraint to the reference, positive.
        label_smoothing: e, the probability that a pair's label is wrong, in [0, 0.5); 0 is DPO.
    Returns: float[P].
    Raises: ValueError if a setting is out of its range.
    Source: arXiv:2403.00409 sec. 3 (rDPO); h = chosen_log_ratios - rejected_log_ratios.
    """
    check_beta(beta)
    check_label_smoothing(label_smoothing)
    logits = beta * (chosen_log_ratios - rejected_log_ratios)
    as_labelled, flipped = -logsigmoid(logits), -logsigmoid(-logits)
    return ((1 - label_smoothing) * as_labelled - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def ipo_terms(chosen_log_ratios: Tensor, rejected_log_ratios: Tensor, *, beta: float) -> Tensor:
    """Compute IPO: (h - 1 / (2 * beta))^2, with h = chosen - rejected log-ratio.

    Args:
        chosen_log_ratios: float[P], log pi(chosen) - log pi_ref(chosen), the mean over tokens, as TRL has it after its
            authors: sums would make the loss grow with the square of the length; carries gradient.
        rejected_log_ratios: float[P], the same of the rejected completion; carries gradient.
        beta: tau of the paper, positive: h is drawn to 1 / (2 * beta).
    Returns: float[P].
    Raises: ValueError if beta is not positive.
    Source: arXiv:2310.12036 eq. 17.
    """
    check_beta(beta)
    return (chosen_log_ratios - rejected_log_ratios - 1 / (2 * beta)).square()


def simpo_terms(
    chosen_means: Tensor, rejected_means: Tensor, *, beta: float, gamma: float, label_smoothing: float = 0.0
) -> Tensor:
    """Compute SimPO: -log sigmoid(beta * (chosen - rejected) - gamma), smoothed like DPO; it needs no reference.

    Args:
        chosen_means: float[P], log pi(chosen) / number of its tokens; carries gradient.
        rejected_means: float[P], the same of the rejected completion; carries gradient.
        beta: scale of the reward, positive; 2 to 10 in the paper.
        gamma: target reward margin, not negative; it is not multiplied by beta.
        label_smoothing: as of `dpo_terms`; 0 in the paper.
    Returns: float[P].
    Raises: ValueError if a setting is out of its range.
    Source: arXiv:2405.14734 eq. 6.
    """
    check_beta(beta)
    check_label_smoothing(label_smoothing)
    if not (gamma >= 0 and math.isfinite(gamma)):
        raise ValueError(f"gamma = {gamma} must not be negative")
    return _smoothed(beta * (chosen_means - rejected_means) - gamma, label_smoothing)


def odds_ratio_terms(chosen_means: Tensor, rejected_means: Tensor) -> Tensor:
    """Compute ORPO's penalty: -log sigmoid(log odds(chosen) - log odds(rejected)), with odds = p / (1 - p).

    ORPO adds it, times lambda, to the mean over tokens of -log pi(chosen). It needs no reference.

    Args:
        chosen_means: float[P], log p = log pi(chosen) / number of its tokens; carries gradient, but none above
            MAX_MEAN_LOGPROB.
        rejected_means: float[P], the same of the rejected completion; carries gradient.
    Returns: float[P].
    Source: arXiv:2403.07691 eq. 4 and 7.
    """
    return -logsigmoid(_log_odds(chosen_means) - _log_odds(rejected_means))


def check_beta(beta: float) -> None:
    """Raise ValueError unless beta is positive and finite."""
    if not (beta > 0 and math.isfinite(beta)):
        raise ValueError(f"beta = {beta} must be positive")


def check_label_smoothing(label_smoothing: float) -> None:
    """Raise ValueError unless the assumed share of wrong labels is in [0, 0.5)."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing = {label_smoothing} must be at least 0 and below 0.5")


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Return -(1 - e) * log sigmoid(logits) - e * log sigmoid(-logits)."""
    return -(1 - label_smoothing) * logsigmoid(logits) - label_smoothing * logsigmoid(-logits)


def _log_odds(mean_logprobs: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log p."""
    bounded = mean_logprobs.clamp(max=MAX_MEAN_LOGPROB)
    return bounded - torch.log(-torch.expm1(bounded))
