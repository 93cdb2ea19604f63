"""Reduce the trajectories of a group to its G episodes: sampled tokens, truncation, last trajectory.

An episode is counted once, however many forks it has; so is each sampled token, which is in the loss of one fork.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from coati_rl.batching.packed_group import as_packed, group_arrays
from coati_rl.types import RolloutGroup, Trajectory


def cached_on_group(function: Callable[[RolloutGroup], np.ndarray]) -> Callable[[RolloutGroup], np.ndarray]:
    """Call a function of a group once for each group, as the coordinator asks several times; its array is read-only."""
    name = function.__name__

    @functools.wraps(function)
    def cached(group: RolloutGroup) -> np.ndarray:
        found: np.ndarray | None = group.cache.get(name)
        if found is None:
            found = group.cache[name] = function(group)
            found.flags.writeable = False
        return found

    return cached


@cached_on_group
def episode_tokens(group: RolloutGroup) -> np.ndarray:
    """Return int64[G], the tokens in the loss, over all forks."""
    tokens = [0] * len(group.scores)
    for packed, counted in zip(as_packed(group).trajectories, group_arrays(group).counted, strict=True):
        tokens[packed.episode] += counted.stop - counted.start
    return np.array(tokens, dtype=np.int64)


@cached_on_group
def context_tokens(group: RolloutGroup) -> np.ndarray:
    """Return int64[G], the context tokens, prompt included; those that a fork shares with its parent count once."""
    tokens = [0] * len(group.scores)
    for packed, counted in zip(as_packed(group).trajectories, group_arrays(group).counted, strict=True):
        shared = packed.num_shared if packed.parent is None else 0
        num_context = len(group.prompt.token_ids) if shared is None else shared
        tokens[packed.episode] += num_context + packed.num_tokens - (counted.stop - counted.start)
    return np.array(tokens, dtype=np.int64)


@cached_on_group
def is_truncated(group: RolloutGroup) -> np.ndarray:
    """Return bool[G], True where the token limit ended a turn."""
    truncated = [False] * len(group.scores)
    for packed in as_packed(group).trajectories:
        truncated[packed.episode] |= any(turn.finish_reason == "length" for turn in packed.turns)
    return np.array(truncated)


@cached_on_group
def has_logprobs(group: RolloutGroup) -> np.ndarray:
    """Return bool[G], False where the engine's log-probability of a token is -inf, inf or NaN: it has no ratio."""
    arrays = group_arrays(group)
    finite = np.isfinite(arrays.logprobs)
    has_all = [True] * len(group.scores)
    if not finite.all():
        for packed, counted in zip(as_packed(group).trajectories, arrays.counted, strict=True):
            has_all[packed.episode] &= bool(finite[counted].all())
    return np.array(has_all)


def final_trajectories(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the last trajectory of each episode, in order, whose text is scored.

    Args:
        trajectories: by episode.
    """
    return list({trajectory.episode: trajectory for trajectory in trajectories}.values())
