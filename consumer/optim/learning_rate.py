"""The learning rate as a function of progress in [0, 1], since filtering makes the number of steps unknown."""

import math


def cosine_learning_rate(progress: float, *, peak: float, final_ratio: float = 0.1) -> float:
    """Half a cosine from the peak to a fraction of it: peak * (f + (1 - f) * (1 + cos(pi * progress)) / 2).

    Args:
        progress: prompts drawn / prompts due; beyond 1 it counts as 1, where the schedule has ended.
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
