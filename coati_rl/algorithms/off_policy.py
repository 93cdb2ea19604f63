"""Weigh policy terms to correct for the difference between the policy that sampled and the one that is trained.

Log-probabilities of engine and trainer differ a little under the same weights, and more when the engine's are older.
R rows, M loss tokens per row, w = pi_old(token) / pi_engine(token).
"""

from typing import get_args

import torch
from torch import Tensor

from coati_rl.algorithms.choices import OF_SEQUENCES, Correction
from coati_rl.algorithms.ratio import masked_log_ratio, ratio_of, sample_mean, sample_sum


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor | None,
    *,
    correction: Correction,
    low: float,
    high: float,
) -> Tensor:
    """Return the weight of each token's policy term; it carries no gradient.

    "tis" (truncated importance sampling) is min(max(w, low), high), with low = 0 one-sided; "icepop" is w inside
    [low, high] and 0 outside; "sequence_tis" is "tis" of the product of w over the sample; "sequence_mask" is 1 on all
    tokens of a sample where exp(mean(log w)) lies in [low, high] and 0 on all others; "sequence_mask_tis" is w there,
    without bounds of its own. A token with weight 0 stays in the loss's denominator.

    Args:
        old_logprobs: float32[R, M], nats, of the trainer before the update.
        rollout_logprobs: float32[R, M], nats, of the engine that sampled.
        loss_mask: bool[R, M].
        sample_index: int[R, M], -1 on padding; only corrections of sequences need it.
        correction: "none" gives 1 everywhere.
        low: lower bound of w, not negative.
        high: upper bound of w, above `low`.
    Returns: float32[R, M], 1 where the mask is False.
    Raises: ValueError if shapes differ, the correction is unknown or the bounds are not in order.
    Source: TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), two-sided
        as in OpenRLHF; ICEPOP: arXiv:2510.18855; sequence_tis: TRL's
        sequence_truncate; sequence masks: OpenRLHF's seq-mask-tis, and its geometric mean alone.
    """
    if not 0 <= low < high:
        raise ValueError(f"off-policy bounds [{low}, {high}] must be in order and not negative")
    log_ratio = masked_log_ratio(old_logprobs, rollout_logprobs, loss_mask).detach()
    weight = ratio_of(log_ratio)
    if correction == "none":
        return torch.ones_like(weight)
    if correction == "tis":
        weight = weight.clamp(low, high)
    elif correction == "icepop":
        weight = torch.where((weight >= low) & (weight <= high), weight, 0.0)
    elif correction in OF_SEQUENCES:
        if sample_index is None:
            raise ValueError(f"{correction} judges whole samples: it needs sample_index")
        if correction == "sequence_tis":
            product = ratio_of(sample_sum(log_ratio, loss_mask, sample_index)).clamp(low, high)
            return torch.where(loss_mask, product, 1.0)
        mean = ratio_of(sample_mean(log_ratio, loss_mask, sample_index))
        is_kept = (mean >= low) & (mean <= high)
        kept = weight if correction == "sequence_mask_tis" else torch.ones_like(weight)
        weight = torch.where(is_kept, kept, 0.0)
    else:
        raise ValueError(f"off-policy correction {correction!r} is unknown; use {', '.join(get_args(Correction))}")
    return torch.where(loss_mask, weight, 1.0)


def drifted_tokens(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sample_index: Tensor,
    *,
    threshold: float,
) -> Tensor:
    """Return bool[R, M], True on tokens with A < 0 of samples that the policy has drifted away from.

    Args:
        logprobs: float32[R, M], nats, of the policy at this update; without effect on the gradient.
        rollout_logprobs: float32[R, M], nats, of the engine that sampled.
        advantages: float32[R, M], without unit.
        loss_mask: bool[R, M].
        sample_index: int[R, M], -1 on padding.
        threshold: of the mean over a sample's tokens of log pi_engine - log pi, in nats.
    Source: arXiv:2512.02556 (DeepSeek-V3.2), off-policy sequence masking.
    """
    drift = sample_mean(masked_log_ratio(rollout_logprobs, logprobs.detach(), loss_mask), loss_mask, sample_index)
    return (drift > threshold) & (torch.where(loss_mask, advantages, 0.0) < 0)
