"""Find the reward of each turn of a group's episodes, and the turn of each token.

G episodes, J turns of the longest. A fork's turns go on where those of its parent end, so that turns are numbered over
all trajectories of an episode.
"""

from collections.abc import Sequence

import numpy as np

from coati_rl.algorithms.advantage import Rewards
from coati_rl.data.packed_group import PackedTrajectory, PackedTurn, as_packed
from coati_rl.types import RolloutGroup


def turn_rewards(group: RolloutGroup, totals: Rewards, valid: np.ndarray) -> Rewards:
    """Return float64[G, J]: what the environment gave at each turn; the rest of an episode's reward at its last turn.

    Args:
        totals: float64[G], the reward of each episode, of which the environment's rewards are a part.
        valid: bool[G].
    Returns: NaN where an episode has no such turn, or is not valid.
    """
    trajectories = as_packed(group).trajectories
    last = [0] * len(group.scores)
    for packed in trajectories:
        episode = packed.episode
        last[episode] = max(last[episode], *(turn.number for turn in packed.turns))
    rewards = np.full((len(last), max(last) + 1), np.nan)
    for episode, turn in enumerate(last):
        if valid[episode]:
            rewards[episode, : turn + 1] = 0.0
            rewards[episode, turn] = totals[episode]
    for packed in trajectories:
        episode = packed.episode
        for given in packed.rewards:
            rewards[episode, _turn_at(packed.turns, given.position)] += given.value
            rewards[episode, last[episode]] -= given.value  # it is part of the total
    return rewards


def values_by_token(packed: PackedTrajectory, loss_mask: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return float32[N], the value of the turn of each token in the loss.

    Args:
        packed: the trajectory.
        loss_mask: bool[tokens after the shared prefix].
        values: float[J], of the turns of its episode.
    """
    counts = [int(np.count_nonzero(loss_mask[turn.start : turn.end])) for turn in packed.turns]
    turns = [turn.number for turn in packed.turns]
    return np.repeat(values[turns], counts).astype(np.float32)


def _turn_at(turns: Sequence[PackedTurn], position: int) -> int:
    """Return the number of the turn that a position is in, or of the last one before it."""
    started = [turn.number for turn in turns if turn.start <= position]
    return started[-1] if started else turns[0].number
