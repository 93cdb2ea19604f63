"""Decide which episodes of a scored group are valid and which are trained, and compute length penalties.

G episodes of one prompt. Valid: the scorer decided and a token was sampled, each with a finite log-probability; the
group's statistics are over valid episodes. In the loss: valid and not filtered. A group has an effect if at least one
of its episodes is in the loss. Where the scorer could not decide about the greedy answer that a group's episodes are
compared with, none of them is valid: nothing else is their baseline.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from coati_rl.algorithms.over_length import over_length_penalty
from coati_rl.batching.episodes import cached_on_group, episode_tokens, has_logprobs, is_truncated
from coati_rl.types import MAX_REWARD, RolloutGroup, Score

# Why a group has no effect. "out of range": mean score outside of --filter-range, but neither 0 nor 1.
NoEffect = Literal["undecidable", "truncated", "always right", "always wrong", "out of range"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthLimit:
    """Limit the length of a task's episodes; the penalty grows over the last `over_length_cache` tokens."""

    max_new_tokens: int
    over_length_cache: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRules:
    """Hold the rules of filtering and length penalties; the defaults train every valid episode."""

    max_new_tokens: int  # that an episode may sample, over all its turns
    filter_range: tuple[float, float] | None = None  # a group is trained if its mean score is strictly inside
    filter_truncated_response: bool = False  # episodes that hit the limit are not trained
    over_length_cache: int | None = None  # tokens before the limit over which the penalty grows; None: no penalty
    reward_scale: float = 1.0  # the full penalty
    length_limits: Mapping[str, LengthLimit] = field(default_factory=dict)  # by task, where it is not the run's
    # GDPO: weights by task and name of a reward, of tasks with several; of others the one reward is normalised.
    decoupled_weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    turn_discount: float | None = None  # of rewards of later turns; None: one advantage per episode
    has_token_rewards: bool = False  # samples hold the reward of each token, for a critic

    def length_limit(self, task: str) -> LengthLimit:
        """Return the limit of a task's episodes."""
        usual = LengthLimit(max_new_tokens=self.max_new_tokens, over_length_cache=self.over_length_cache)
        return self.length_limits.get(task, usual)


@cached_on_group
def is_valid(group: RolloutGroup) -> np.ndarray:
    """Return bool[G], True for episodes with a verdict, |reward| at most MAX_REWARD, loss tokens and their logprobs."""
    scored = np.array([_is_scored(score) for score in group.scores]) & has_usable_baseline(group)
    valid: np.ndarray = scored & (episode_tokens(group) > 0) & has_logprobs(group)
    return valid


def has_usable_baseline(group: RolloutGroup) -> bool:
    """Return False if the lease asked for a greedy answer, and the scorer could not decide about it."""
    return group.baseline is None or _is_scored(group.baseline.score)


def is_in_loss(group: RolloutGroup, rules: GroupRules) -> np.ndarray:
    """Return bool[G], True for trained episodes; none if the mean score over all valid ones is out of range."""
    valid = is_valid(group)
    if not valid.any() or not _is_in_range(group, valid, rules):
        return np.zeros_like(valid)
    return valid & ~is_truncated(group) if rules.filter_truncated_response else valid


def reason_without_effect(group: RolloutGroup, rules: GroupRules) -> NoEffect | None:
    """Return why no episode of the group is in the loss; None if one is."""
    if is_in_loss(group, rules).any():
        return None
    valid = is_valid(group)
    if not valid.any():
        return "undecidable"
    if rules.filter_truncated_response and is_truncated(group)[valid].all():
        return "truncated"  # also if all are wrong, as truncated answers usually are
    mean_score = _mean_score(group, valid)
    return "always right" if mean_score == 1 else "always wrong" if mean_score == 0 else "out of range"


def over_length_penalties(group: RolloutGroup, rules: GroupRules) -> np.ndarray:
    """Return float64[G] to be added to the rewards, in [-reward_scale, 0]; see `over_length_penalty`."""
    return length_penalties(episode_tokens(group).tolist(), rules, task=group.prompt.task)


def length_penalties(lengths: Sequence[int], rules: GroupRules, *, task: str) -> np.ndarray:
    """Return float64[N], the penalties of N responses of a task with so many tokens; see `over_length_penalty`."""
    limit = rules.length_limit(task)
    if limit.over_length_cache is None:
        return np.zeros(len(lengths))
    penalties = [
        over_length_penalty(
            num_tokens,
            max_length=limit.max_new_tokens,
            cache_length=limit.over_length_cache,
            scale=rules.reward_scale,
        )
        for num_tokens in lengths
    ]
    return np.array(penalties, dtype=np.float64)


def _is_scored(score: Score) -> bool:
    return score.verdict != "invalid" and abs(score.reward) <= MAX_REWARD  # False for NaN, too


def _mean_score(group: RolloutGroup, valid: np.ndarray) -> float:
    """Return the mean score in [0, 1] over the valid episodes, of which there is at least one.

    It is of rewards, not of correct answers: a right answer in a broken format earns nothing, and a graded reward below
    1 trains. The length penalty is left out, as it says nothing about the prompt's difficulty.
    """
    counted = [score for score, is_counted in zip(group.scores, valid.tolist(), strict=True) if is_counted]
    scores = [score.reward if score.filter_score is None else score.filter_score for score in counted]
    return float(np.array([min(max(score, 0.0), 1.0) for score in scores]).mean())


def _is_in_range(group: RolloutGroup, valid: np.ndarray, rules: GroupRules) -> bool:
    if rules.filter_range is None:
        return True
    low, high = rules.filter_range
    return low < _mean_score(group, valid) < high
