"""Compute the learning rate from progress in [0, 1], since filtering makes the number of steps unknown."""

import math


def cosine_learning_rate(progress: float, *, peak: float, final_ratio: float = 0.1) -> float:
    """Return peak * (f + (1 - f) * (1 + cos(pi * progress)) / 2), half a cosine from the peak to f times the peak.

    Args:
        progress: prompts drawn / prompts due; values above 1 count as 1, the end of the schedule.
        peak: learning rate at progress 0.
        final_ratio: the rate at progress 1 is this fraction (f) of the peak.
    Returns: the learning rate, per optimizer step.
    Raises: ValueError if progress is negative or NaN, or final_ratio is outside [0, 1].
    Source: arXiv:1608.03983 eq. 5, one cycle.
    """
    if not progress >= 0:
        raise ValueError(f"progress = {progress} must not be negative")
    if not 0 <= final_ratio <= 1:
        raise ValueError(f"final_ratio = {final_ratio} must lie in [0, 1]")
    cosine = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
    return peak * (final_ratio + (1 - final_ratio) * cosine)
