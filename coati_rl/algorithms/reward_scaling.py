"""Normalise and clip the rewards of a mini-batch before advantages are computed.

Statistics are of the mini-batch, and not of all rewards so far: there is no state that a checkpoint has to hold, and a
step's advantages follow from its own rollouts alone. All arithmetic is float64, without unit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coati_rl.algorithms.advantage import STD_EPS, Rewards


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardScaling:
    """Compute clip((R - mean) / std, low, high); the defaults change nothing."""

    mean: float = 0.0
    std: float = 1.0  # in units of reward, above 0
    clip: tuple[float, float] | None = None  # bounds of the result

    def __call__(self, rewards: Rewards) -> Rewards:
        """Return float64[G] of float64[G]."""
        scaled = rewards if (self.mean, self.std) == (0.0, 1.0) else (rewards - self.mean) / self.std
        return scaled if self.clip is None else scaled.clip(*self.clip)


def fit_scaling(
    rewards: Sequence[NDArray[np.float64]], *, is_normalized: bool, clip: tuple[float, float] | None
) -> RewardScaling:
    """Return the scaling of a mini-batch.

    Args:
        rewards: float64[N] of each group, of its valid samples.
        is_normalized: subtract the mean over all of them and divide by their deviation.
        clip: bounds of the normalised rewards, or of the rewards; None: there are none.
    Returns: with mean and unbiased standard deviation (n - 1) plus eps; equal rewards, and a single one, become 0.
    Source: reward scaling and clipping in arXiv:2005.12729; the deviation is that of TRL's scale_rewards="batch".
    """
    if not is_normalized:
        return RewardScaling(clip=clip)
    values = np.concatenate([np.empty(0), *rewards])
    if len(values) == 0:
        return RewardScaling(clip=clip)
    is_equal = values.max() == values.min()
    std = 1.0 if is_equal else float(values.std(ddof=1)) + STD_EPS
    return RewardScaling(mean=float(values[0] if is_equal else values.mean()), std=std, clip=clip)
