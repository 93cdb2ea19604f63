"""Compute an advantage for each turn of multi-turn episodes, from the rewards that follow it."""

import numpy as np

from coati_rl.algorithms.advantage import Estimator, Rewards, group_advantages


def turn_advantages(rewards: Rewards, *, discount: float, estimator: Estimator) -> Rewards:
    """Compute A_ij = estimator over the episodes i with a turn j of G_ij = r_ij + discount * G_i(j+1).

    G_ij is the return to go of turn j. Episodes of one prompt are compared turn by turn: the first turns with each
    other, the second ones, and so on. A turn that one episode alone has reached has nothing to be compared with.

    Args:
        rewards: float64[G, J], the reward of turn j of episode i; NaN where an episode has no such turn, and in all
            turns of an episode that is not valid.
        discount: gamma, 0 to 1.
        estimator: of advantages, for each turn.
    Returns: float64[G, J], without unit; exactly 0 where `rewards` is NaN, and, with estimators that compare, where all
        returns of a turn are equal or one episode alone has it. With one turn per episode it is `group_advantages`.
    Raises: ValueError as `group_advantages` does.
    Source: returns to go per step, compared in groups of steps: arXiv:2505.10978 (GiGPO), where steps are grouped by
        equal states, and here by their number; advantages per turn in GRPO: arXiv:2505.11821.
    """
    has_turn = ~np.isnan(rewards)
    returns = np.where(has_turn, rewards, 0.0)
    for turn in range(returns.shape[1] - 2, -1, -1):
        returns[:, turn] += discount * returns[:, turn + 1]
    advantages = np.zeros_like(returns)
    for turn in range(returns.shape[1]):
        advantages[:, turn] = group_advantages(returns[:, turn], has_turn[:, turn], estimator=estimator)
    return advantages
