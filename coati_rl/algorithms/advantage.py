"""Compute the advantages of one prompt's G samples from their rewards.

All arithmetic is float64: in float32 seven equal rewards of 0.7 have a standard deviation of 1e-8 instead of 0, and
divided by a small eps that becomes an advantage.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]
Estimator = Callable[[Rewards], Rewards]  # float64[N] rewards of the valid samples to float64[N] advantages, N >= 1

STD_EPS = 1e-6  # in units of reward
MAX_ADVANTAGE = 1e12  # absolute bound for a user's estimator: the loss is float32, and its gradient is squared


def group_norm(rewards: Rewards) -> Rewards:
    """Compute A_i = (R_i - mean(R)) / (std(R) + eps) with the unbiased standard deviation (n - 1).

    Source: arXiv:2402.03300 sec. 4.1.2.
    """
    centred = group_mean(rewards)
    variance = (centred * centred).sum() / (len(rewards) - 1)
    return centred / (float(np.sqrt(variance)) + STD_EPS)


def group_mean(rewards: Rewards) -> Rewards:
    """Compute A_i = R_i - mean(R).

    Source: arXiv:2503.20783 sec. 3.2 (Dr. GRPO); the baseline of REINFORCE++-baseline, arXiv:2501.03262.
    """
    return rewards - float(rewards.mean())


def leave_one_out(rewards: Rewards) -> Rewards:
    """Compute A_i = R_i - mean of the others = n / (n - 1) * (R_i - mean(R)).

    Source: arXiv:2402.14740 sec. 3.3 (RLOO).
    """
    return group_mean(rewards) * (len(rewards) / (len(rewards) - 1))


def max_rl(rewards: Rewards) -> Rewards:
    """Compute A_i = (R_i - mean(R)) / (mean(R) + eps), 0 where the mean is not above eps times the largest |R|.

    Rewards that add up to 0 but for rounding, as 0.1, 0.2 and -0.3 do, would else have advantages of 1e5. Of rewards 0
    and 1 it is the gradient of log-likelihood of a right answer in place of its probability's.
    Source: arXiv:2602.02710 (MaxRL).
    """
    mean = float(rewards.mean())
    is_positive = mean > STD_EPS * float(np.abs(rewards).max())
    return group_mean(rewards) / (mean + STD_EPS) if is_positive else np.zeros_like(rewards)


def opo(rewards: Rewards, lengths: Rewards | None = None) -> Rewards:
    """Compute A_i = R_i - sum(T_j * R_j) / sum(T_j), T_j the tokens of sample j: the baseline of least variance.

    Raises: ValueError without lengths.
    Source: arXiv:2505.23585 (OPO).
    """
    if lengths is None:
        raise ValueError("opo weighs rewards by the samples' lengths, which are not given")
    return rewards - float((lengths * rewards).sum() / lengths.sum())


def reward(rewards: Rewards) -> Rewards:
    """Return A_i = R_i, independent of the group; whitening over the batch is the only baseline.

    Source: arXiv:2501.03262 (REINFORCE++).
    """
    return rewards


def remax(rewards: Rewards, baseline: float | None = None) -> Rewards:
    """Compute A_i = R_i - b, b the reward of the greedy answer to the same prompt; it needs no group.

    Raises: ValueError without it.
    Source: arXiv:2310.10505 (ReMax).
    """
    if baseline is None:
        raise ValueError("remax compares rewards with that of a greedy answer, the baseline, which is not given")
    return rewards - baseline


GDPO = "gdpo"  # `decoupled_advantages`, which needs the rewards one by one
GAE = "gae"  # `coati_rl.algorithms.gae`, which needs a critic's values
ADVANTAGE_ESTIMATORS: dict[str, Estimator] = {
    estimator.__name__: estimator for estimator in (group_norm, group_mean, leave_one_out, reward, max_rl, opo, remax)
}
_COMPARING = (group_norm, group_mean, leave_one_out, max_rl, opo)  # samples of a group with each other


def compares_samples(name: str) -> bool:
    """Return True if the built-in estimator of this name needs a group: one sample, or equal ones, give 0."""
    return name == GDPO or ADVANTAGE_ESTIMATORS.get(name) in _COMPARING


def needs_baseline(name: str) -> bool:
    """Return True if the built-in estimator of this name needs a greedy answer to each prompt."""
    return ADVANTAGE_ESTIMATORS.get(name) is remax


def group_advantages(
    rewards: Rewards,
    valid: NDArray[np.bool_],
    *,
    estimator: Estimator,
    lengths: NDArray[np.int64] | None = None,
    baseline: float | None = None,
) -> Rewards:
    """Compute the advantages of one group by `estimator` over the valid samples; undefined cases are 0.

    Args:
        rewards: float64[G], the reward of each sample; not read where `valid` is False.
        valid: bool[G], False where the scorer could not decide.
        estimator: one of ADVANTAGE_ESTIMATORS, or a user's.
        lengths: int64[G], tokens of each sample, which `opo` needs.
        baseline: reward of the greedy answer, which `remax` needs.
    Returns: float64[G], without unit; exactly 0 on invalid samples. Where the estimator compares samples of a group it
        is exactly 0 also when all valid rewards are equal or fewer than two samples are valid.
    Raises: ValueError if the shapes differ, a valid reward is not finite, or the estimator's result is not one finite
        number per valid sample, of absolute value at most MAX_ADVANTAGE.
    """
    if rewards.ndim != 1 or rewards.shape != valid.shape:
        raise ValueError(f"rewards {rewards.shape} and valid {valid.shape} must both have shape [G]")
    valid = valid.astype(bool)
    advantages = np.zeros(rewards.shape, dtype=np.float64)
    counted = rewards[valid].astype(np.float64)
    values = counted.tolist()  # as there are few, faster than arrays
    if not all(map(math.isfinite, values)):
        raise ValueError(f"rewards of valid samples must be finite: {values}")
    if not values or (estimator in _COMPARING and max(values) == min(values)):
        return advantages
    if estimator is opo:
        counted_lengths = None if lengths is None else lengths[valid].astype(np.float64)
        found = opo(counted, counted_lengths)
    elif estimator is remax:
        found = remax(counted, baseline)
    else:
        found = np.asarray(estimator(counted), dtype=np.float64)
    is_vector = found.shape == counted.shape
    if not is_vector or not all(abs(value) <= MAX_ADVANTAGE for value in found.tolist()):  # False for NaN, too
        raise ValueError(
            f"advantages must be one finite number per valid sample ({counted.size}), of absolute value at most "
            f"{MAX_ADVANTAGE:g}, not {found!r}"
        )
    advantages[valid] = found
    return advantages


def decoupled_advantages(rewards: Rewards, valid: NDArray[np.bool_], *, weights: Sequence[float]) -> Rewards:
    """Compute A_i = sum over k of w_k * (R_ik - mean(R_k)) / (std(R_k) + eps): each reward is normalised by itself.

    Samples that differ in one reward alone differ in their advantages, however large the others are. The paper brings
    the advantages of a batch to mean 0 and deviation 1 afterwards, which --whiten-advantages does.

    Args:
        rewards: float64[G, K], the K rewards of each sample; not read where `valid` is False.
        valid: bool[G], False where the scorer could not decide.
        weights: of the K rewards.
    Returns: float64[G], without unit; exactly 0 on invalid samples. A reward that is equal on all valid samples adds
        exactly 0.
    Raises: ValueError if the shapes differ or a valid reward is not finite.
    Source: arXiv:2601.05242 (GDPO); verl's adv_estimator=gdpo.
    """
    if rewards.shape != (len(valid), len(weights)):
        raise ValueError(f"rewards {rewards.shape} must have shape [G, K] = [{len(valid)}, {len(weights)}]")
    advantages = np.zeros(len(valid), dtype=np.float64)
    for column, weight in zip(rewards.T, weights, strict=True):
        advantages += weight * group_advantages(column, valid, estimator=group_norm)
    return advantages
