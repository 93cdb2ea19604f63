"""Find the reward of each turn of a group's episodes, and the turn of each token.

G episodes, J turns of the longest. A fork's turns go on where those of its parent end, so that turns are numbered over
all trajectories of an episode.
"""

from collections.abc import Sequence

import numpy as np

from coati_rl.algorithms.advantage import Rewards
from coati_rl.batching.packed_group import PackedReward, PackedTrajectory, PackedTurn, as_packed, group_arrays
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
            rewards[episode, _turn_at(packed.turns, given.position).number] += given.value
            rewards[episode, last[episode]] -= given.value  # it is part of the total
    return rewards


def token_rewards(group: RolloutGroup, totals: Rewards) -> list[np.ndarray]:
    """Return float32[N] of each trajectory: the reward of each of its tokens in the loss.

    What an environment gave is at the last token of the turn that it was given for; the rest of the episode's reward,
    which is of no turn, at the last token of each of its trajectories.

    Args:
        totals: float64[G], the reward of each episode, of which the environment's rewards are a part.
    """
    packed, arrays = as_packed(group), group_arrays(group)
    left = totals.astype(np.float64)
    for trajectory in packed.trajectories:
        for given in trajectory.rewards:
            left[trajectory.episode] -= given.value
    found = []
    for trajectory, own in zip(packed.trajectories, arrays.own, strict=True):
        rest = float(left[trajectory.episode])
        found.append(trajectory_rewards(trajectory.turns, trajectory.rewards, arrays.loss_mask[own], rest=rest))
    return found


def trajectory_rewards(
    turns: Sequence[PackedTurn], given: Sequence[PackedReward], loss_mask: np.ndarray, *, rest: float
) -> np.ndarray:
    """Return float32[N], the reward of each token of a trajectory in the loss.

    Args:
        turns: in order; at least one.
        given: by an environment.
        loss_mask: bool[tokens that places are counted in].
        rest: of the episode's reward, what is of no turn.
    """
    counts = np.concatenate([[0], np.cumsum(loss_mask)])  # of loss tokens before each place
    rewards = np.zeros(int(counts[-1]), dtype=np.float32)
    if len(rewards):
        for each in given:
            end = _turn_at(turns, each.position).end
            rewards[max(int(counts[end]) - 1, 0)] += each.value
        rewards[-1] += rest
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


def _turn_at(turns: Sequence[PackedTurn], position: int) -> PackedTurn:
    """Return the turn that a position is in, or the last one before it."""
    started = [turn for turn in turns if turn.start <= position]
    return started[-1] if started else turns[0]
