"""Group advantages: the rewards of one prompt's G samples go in, how much better than its group each one was comes out.

All arithmetic is float64: in float32 seven equal rewards of 0.7 have a standard deviation of 1e-8 instead of 0, and
divided by a small eps that becomes an advantage.
"""

import numpy as np
from numpy.typing import NDArray


def grpo_advantages(
    rewards: NDArray[np.float64], valid: NDArray[np.bool_], *, eps: float = 1e-6
) -> NDArray[np.float64]:
    """Standardise rewards within a group: A_i = (R_i - mean(R)) / (std(R) + eps) over the valid samples.

    Args:
        rewards: float64[G], the reward of each sample; not read where `valid` is False.
        valid: bool[G], False where the scorer could not decide or the sample is masked out.
        eps: added to the standard deviation, in units of reward.
    Returns: float64[G], without unit; exactly 0 on invalid samples, and everywhere when all valid rewards are equal or
        fewer than two samples are valid (one sample says nothing about its group).
    Raises: ValueError if the shapes differ, eps is negative or a valid reward is not finite.
    Source: arXiv:2402.03300 sec. 4.1.2; the standard deviation is the unbiased one (n - 1).
    """
    if rewards.ndim != 1 or rewards.shape != valid.shape:
        raise ValueError(f"rewards {rewards.shape} and valid {valid.shape} must both have shape [G]")
    if eps < 0:
        raise ValueError(f"eps = {eps} must not be negative")
    valid = valid.astype(bool)
    advantages = np.zeros(rewards.shape, dtype=np.float64)
    counted = rewards[valid].astype(np.float64)
    if not np.isfinite(counted).all():
        raise ValueError(f"rewards of valid samples must be finite: {counted.tolist()}")
    if counted.size < 2 or counted.max() == counted.min():
        return advantages
    advantages[valid] = (counted - counted.mean()) / (counted.std(ddof=1) + eps)
    return advantages
