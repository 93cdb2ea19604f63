"""Reduce the trajectories of a group to its G episodes: what each has sampled, whether it was cut off, how it ends.

An episode is counted once, however many forks it has; so is each sampled token, which is in the loss of one fork.
"""

from collections.abc import Sequence

import numpy as np

from coati_rl.types import RolloutGroup, Trajectory


def episode_tokens(group: RolloutGroup) -> np.ndarray:
    """int64[G]: tokens in the loss, over all forks."""
    tokens = [0] * len(group.scores)
    for trajectory in group.trajectories:
        tokens[trajectory.episode] += trajectory.num_loss_tokens
    return np.array(tokens, dtype=np.int64)


def context_tokens(group: RolloutGroup) -> np.ndarray:
    """int64[G]: tokens that the policy was given, prompt included; those that a fork shares with its parent once."""
    tokens = [0] * len(group.scores)
    for each in group.trajectories:
        num_shared = 0 if each.prefix.parent is None else each.prefix.num_tokens
        tokens[each.episode] += len(each.token_ids) - num_shared - each.num_loss_tokens
    return np.array(tokens, dtype=np.int64)


def is_truncated(group: RolloutGroup) -> np.ndarray:
    """bool[G]: True where the token limit ended a turn."""
    truncated = [False] * len(group.scores)
    for trajectory in group.trajectories:
        truncated[trajectory.episode] |= trajectory.is_truncated
    return np.array(truncated)


def final_trajectories(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The last one of each episode, in order: with the text that is scored.

    Args:
        trajectories: by episode.
    """
    return list({trajectory.episode: trajectory for trajectory in trajectories}.values())
