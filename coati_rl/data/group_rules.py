"""Decide what a scored group is good for: which episodes count, which of these are trained, what length takes off
rewards.

G episodes of one prompt. Valid: the scorer decided and a token was sampled; valid episodes make the group's statistics.
In the loss: valid and not filtered. A group has an effect if at least one of its episodes is in the loss.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from coati_rl.algorithms.over_length import over_length_penalty
from coati_rl.data.episodes import episode_tokens, is_truncated
from coati_rl.types import MAX_REWARD, RolloutGroup, Score

# Why a group has no effect. "out of range": mean score outside of --filter-range, but neither 0 nor 1.
NoEffect = Literal["undecidable", "truncated", "always right", "always wrong", "out of range"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimit:
    """How long the episodes of a task may be, and from where on length is punished."""

    max_new_tokens: int
    over_length_cache: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRules:
    """The defaults train every valid episode for its score."""

    max_new_tokens: int  # that an episode may sample, over all its turns
    filter_range: tuple[float, float] | None = None  # a group is trained if its mean score is strictly inside
    filter_truncated_response: bool = False  # episodes that hit the limit are not trained
    over_length_cache: int | None = None  # tokens before the limit over which the punishment grows; None: there is none
    reward_scale: float = 1.0  # what the full punishment takes off
    length_limits: Mapping[str, LengthLimit] = field(default_factory=dict)  # by task, where it is not the run's

    def length_limit(self, task: str) -> LengthLimit:
        """Return the limit of a task's episodes."""
        usual = LengthLimit(max_new_tokens=self.max_new_tokens, over_length_cache=self.over_length_cache)
        return self.length_limits.get(task, usual)


def is_valid(group: RolloutGroup) -> np.ndarray:
    """bool[G]: episodes with a verdict, a reward of at most MAX_REWARD in size and at least one token in the loss."""
    return np.array([_is_scored(score) for score in group.scores]) & (episode_tokens(group) > 0)


def is_in_loss(group: RolloutGroup, rules: GroupRules) -> np.ndarray:
    """bool[G]: episodes that are trained; none if the mean score over all valid ones is out of range."""
    valid = is_valid(group)
    if not valid.any() or not _is_in_range(group, valid, rules):
        return np.zeros_like(valid)
    return valid & ~is_truncated(group) if rules.filter_truncated_response else valid


def reason_without_effect(group: RolloutGroup, rules: GroupRules) -> NoEffect | None:
    """Why no episode of the group is in the loss; None if one is."""
    if is_in_loss(group, rules).any():
        return None
    valid = is_valid(group)
    if not valid.any():
        return "undecidable"
    if rules.filter_truncated_response and is_truncated(group)[valid].all():
        return "truncated"  # also if all of them are wrong, as answers that were cut off are
    mean_score = _mean_score(group, valid)
    return "always right" if mean_score == 1 else "always wrong" if mean_score == 0 else "out of range"


def over_length_penalties(group: RolloutGroup, rules: GroupRules) -> np.ndarray:
    """float64[G]: what is added to the rewards, in [-reward_scale, 0]; see `over_length_penalty`."""
    limit = rules.length_limit(group.prompt.task)
    if limit.over_length_cache is None:
        return np.zeros(len(group.scores))
    penalties = [
        over_length_penalty(
            num_tokens,
            max_length=limit.max_new_tokens,
            cache_length=limit.over_length_cache,
            scale=rules.reward_scale,
        )
        for num_tokens in episode_tokens(group).tolist()
    ]
    return np.array(penalties, dtype=np.float64)


def _is_scored(score: Score) -> bool:
    return score.verdict != "invalid" and abs(score.reward) <= MAX_REWARD  # False for NaN, too


def _mean_score(group: RolloutGroup, valid: np.ndarray) -> float:
    """Mean over the valid episodes, of which there is one at least, in [0, 1].

    Not of the answers that are right: what earns nothing, as a right answer in a broken format, trains nothing, and a
    graded reward below 1 does. Length is left out: it says nothing about how hard the prompt is.
    """
    counted = [score for score, is_counted in zip(group.scores, valid.tolist(), strict=True) if is_counted]
    scores = [score.reward if score.filter_score is None else score.filter_score for score in counted]
    return float(np.array([min(max(score, 0.0), 1.0) for score in scores]).mean())


def _is_in_range(group: RolloutGroup, valid: np.ndarray, rules: GroupRules) -> bool:
    if rules.filter_range is None:
        return True
    low, high = rules.filter_range
    return low < _mean_score(group, valid) < high
