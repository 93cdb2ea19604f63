"""Weights against the difference between the policy that sampled and the one that is trained.

Engine and trainer disagree a little about the same weights, and more when the engine's are older. In: what both say of
each token. Out: a weight for its policy term. R rows, M loss tokens per row, w = pi_old(token) / pi_engine(token).
"""

import torch
from torch import Tensor

from coati_rl.algorithms.choices import Correction
from coati_rl.algorithms.ratio import masked_log_ratio, ratio_of, sample_mean


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
    """The weight of each token's policy term; it carries no gradient.

    "tis" (truncated importance sampling) is min(max(w, low), high), with low = 0 one-sided; "icepop" is w inside
    [low, high] and 0 outside; "sequence_mask" is 1 on all tokens of a sample where exp(mean(log w)) lies in [low, high]
    and 0 on all others. A token with weight 0 keeps its share of the loss's denominator.

    Args:
        old_logprobs: float32[R, M], nats, of the trainer before the update.
        rollout_logprobs: float32[R, M], nats, of the engine that sampled.
        loss_mask: bool[R, M].
        sample_index: int[R, M], -1 on padding; only "sequence_mask" needs it.
        correction: "none" gives 1 everywhere.
        low: lower bound of w, not negative.
        high: upper bound of w, above `low`.
    Returns: float32[R, M], 1 where the mask is False.
    Raises: ValueError if shapes differ, the correction is unknown or the bounds are not in order.
    Source: TIS: Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025), two-sided
        as in OpenRLHF; ICEPOP: arXiv:2510.18855; sequence mask: the geometric mean of OpenRLHF's seq-mask-tis.
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
    elif correction == "sequence_mask":
        if sample_index is None:
            raise ValueError("sequence_mask judges whole samples: it needs sample_index")
        mean = ratio_of(sample_mean(log_ratio, loss_mask, sample_index))
        weight = ((mean >= low) & (mean <= high)).to(weight.dtype)
    else:
        raise ValueError(f"off-policy correction {correction!r} is unknown; use none, tis, icepop or sequence_mask")
    return torch.where(loss_mask, weight, 1.0)
