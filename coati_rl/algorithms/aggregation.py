"""Aggregate token terms to one loss by a weight per token, known at once, and a scale per optimizer step, known last.

The loss of a step is `scale * sum_i sum_t weight_i * term_it` over its samples i with T_i tokens each. Weights need
only the sample itself, so that mini-batches can stream to the trainer and the gradient accumulate unnormalised; the
scale holds the global denominator and multiplies the summed gradient once, before clipping.

Both count the tokens that the policy sampled. A token that is masked later (a skipped sample, an off-policy band)
stays in the denominator, else the gradient would depend on how the batch was split.
"""

from typing import Literal, get_args

LossVariation = Literal["sample_level", "token_level", "constant"]
_MODES = get_args(LossVariation)


def token_weight(length: int, mode: LossVariation, *, max_length: int) -> float:
    """Return the weight of a sample's tokens: 1 / T_i at sample level, 1 at token level, 1 / L_max if constant.

    Args:
        length: tokens of the sample that the loss counts (T_i).
        mode: "sample_level", every sample has equal weight (GRPO); "token_level", every token (DAPO); "constant",
            every token, with a denominator that does not depend on lengths (Dr. GRPO).
        max_length: tokens that a response may have (L_max).
    Returns: the unnormalised weight, to be scaled by `loss_scale`.
    Raises: ValueError if a length is not positive or the mode unknown.
    Source: sample level arXiv:2402.03300 eq. 3; token level arXiv:2503.14476 sec. 3.3; constant arXiv:2503.20783
        sec. 3.2.
    """
    _check_mode(mode)
    if length <= 0:
        raise ValueError(f"length = {length} must be positive: a sample without tokens has no term")
    if max_length <= 0:
        raise ValueError(f"max_length = {max_length} must be positive")
    return {"sample_level": 1.0 / length, "token_level": 1.0, "constant": 1.0 / max_length}[mode]


def loss_scale(num_samples: int, num_tokens: int, mode: LossVariation) -> float:
    """Return the factor that turns the weighted sum of an optimizer step into its mean.

    Args:
        num_samples: valid samples over the global batch.
        num_tokens: tokens over the global batch that the loss counts.
        mode: as for `token_weight`.
    Returns: 1 / num_tokens at token level, else 1 / num_samples.
    Raises: ValueError if the denominator is not positive or the mode unknown.
    """
    _check_mode(mode)
    name, count = ("num_tokens", num_tokens) if mode == "token_level" else ("num_samples", num_samples)
    if count <= 0:
        raise ValueError(f"{name} = {count} must be positive at {mode}")
    return 1.0 / count


def _check_mode(mode: str) -> None:
    if mode not in _MODES:
        raise ValueError(f"loss variation {mode!r} is unknown; use one of {', '.join(_MODES)}")
