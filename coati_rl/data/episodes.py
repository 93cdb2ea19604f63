"""Reduce the trajectories of a group to its G episodes: sampled tokens, truncation, last trajectory.

An episode is counted once, however many forks it has; so is each sampled token, which is in the loss of one fork.
"""

from collections.abc import Sequence

import numpy as np

from coati_rl.types import RolloutGroup, Trajectory


def episode_tokens(group: RolloutGroup) -> np.ndarray:
    """Return int64[G], the tokens in the loss, over all forks."""
    tokens = [0] * len(group.scores)
    for trajectory in group.trajectories:
        tokens[trajectory.episode] += trajectory.num_loss_tokens
    return np.array(tokens, dtype=np.int64)


def context_tokens(group: RolloutGroup) -> np.ndarray:
    """Return int64[G], the context tokens, prompt included; those that a fork shares with its parent count once."""
    tokens = [0] * len(group.scores)
    for each in group.trajectories:
        num_shared = 0 if each.prefix.parent is None else each.prefix.num_tokens
        tokens[each.episode] += len(each.token_ids) - num_shared - each.num_loss_tokens
    return np.array(tokens, dtype=np.int64)


def is_truncated(group: RolloutGroup) -> np.ndarray:
    """Return bool[G], True where the token limit ended a turn."""
    truncated = [False] * len(group.scores)
    for trajectory in group.trajectories:
        truncated[trajectory.episode] |= trajectory.is_truncated
    return np.array(truncated)


def final_trajectories(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the last trajectory of each episode, in order, whose text is scored.

    Args:
        trajectories: by episode.
    """
    return list({trajectory.episode: trajectory for trajectory in trajectories}.values())
