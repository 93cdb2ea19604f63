"""Combine several rewards into one: the weighted sum of their scores or what a user's function makes of them.

reward = sum of weight x reward, or with --reward-combine the function's number. Verdict, correctness, format, detail
and the value that --filter-range filters are those of the first reward; if any of them is invalid, the score is
invalid.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.plugins import load_function
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.returned_value import as_number
from rewards.reward import Reward, bounded, invalid_score, only_computes, warm_up

Combine = Callable[[dict[str, float]], Any]  # rewards by name, as in a score's breakdown, to one number


class Combination:
    """Make one score of the scores that several rewards gave a response.

    Args:
        weights: of the rewards, by their short names, in order.
        function: makes the reward from the breakdown; None: the weighted sum.
    """

    def __init__(self, weights: Mapping[str, float], function: Combine | None = None) -> None:
        self._weights = dict(weights)
        self._function = function

    def __call__(self, scores: Sequence[Score]) -> Score:
        """Return the combined score; `scores` are one of each reward, in order."""
        pairs = [*zip(self._weights.items(), scores, strict=True)]
        undecided = [f"{name}: {score.detail}" for (name, _), score in pairs if score.verdict == "invalid"]
        if undecided:
            return invalid_score("; ".join(undecided))
        breakdown: dict[str, float] = {}
        for (name, _), score in pairs:
            breakdown[name] = score.reward
            breakdown.update({f"{name}/{key}": value for key, value in score.breakdown.items()})
        if self._function is None:
            reward: float | None = sum(weight * score.reward for (_, weight), score in pairs)
        else:
            try:
                returned = self._function(dict(breakdown))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a user's function raises
                return invalid_score(f"--reward-combine: {type(error).__name__}: {shorten(error, 200)}")
            reward = as_number(returned)
            if reward is None:
                return invalid_score(f"--reward-combine returned {shorten(repr(returned))}; return a finite number")
        first = scores[0]
        score = Score(
            reward=reward or 0.0,
            answer_correct=first.answer_correct,
            format_valid=first.format_valid,
            verdict=first.verdict,
            detail=first.detail,
            breakdown=breakdown,
            filter_score=first.reward if first.filter_score is None else first.filter_score,
        )
        return bounded(score)


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedPart:
    """Hold a reward with its name and weight."""

    name: str  # short; the key in the breakdown
    weight: float
    reward: Reward


class WeightedReward:
    """Implement `Reward` by combining at least one part.

    Args:
        parts: the rewards.
        combine: of --reward-combine; None: the weighted sum.
    """

    def __init__(self, parts: Sequence[WeightedPart], combine: Combine | None = None) -> None:
        self._parts = tuple(parts)
        self._combine = Combination({part.name: part.weight for part in parts}, combine)
        self.is_batch = any(part.reward.is_batch for part in parts)
        self.is_concurrent = any(getattr(part.reward, "is_concurrent", False) for part in parts)
        self.only_computes = combine is None and all(only_computes(part.reward) for part in parts)
        self.is_fast = all(getattr(part.reward, "is_fast", False) for part in parts)

    def warm_up(self) -> None:
        """See `rewards.reward.warm_up`."""
        for part in self._parts:
            warm_up(part.reward)

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        for scores in zip(*(part.reward.score(responses, problem) for part in self._parts), strict=True):
            yield self._combine(scores)


class _TrialBreakdown(dict[str, float]):
    """Hold 0 for every reward, and for every value that one may report besides: NAME/VALUE."""

    def __missing__(self, key: str) -> float:
        if isinstance(key, str) and key.partition("/")[0] in self and "/" in key:
            return 0.0
        raise KeyError(key)


def load_combine(
    name: str | None, rewards: Sequence[str], *, own_names: Callable[[], Mapping[str, str]] = dict
) -> Combine | None:
    """Load the function of --reward-combine, and call it once with rewards of 0.

    One whose only parameter is `reward_dict` is RL4LLM's: it gets a tensor of one number by each reward's own name.

    Args:
        name: FILE.py:FUNCTION, with an absolute path; None: there is none.
        rewards: their short names.
        own_names: returns those that classes give themselves, by short name.
    Raises: ConfigError if it cannot be loaded, fails, or returns no finite number.
    """
    if name is None:
        return None
    function: Combine = load_function(name, flag="--reward-combine")
    names = list(rewards)
    if _parameters(function) == ["reward_dict"]:
        given = own_names()
        own = {short: given.get(short, short) for short in rewards}
        names = [*own.values()]
        if twice := [each for each in names if names.count(each) > 1]:
            raise ConfigError(f"--reward-combine {name}: two rewards have the name {twice[0]!r}; name them differently")
        function = _of_tensors(function, own)
    try:
        value = function(_TrialBreakdown.fromkeys(rewards, 0.0))
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"--reward-combine {name}: fails on rewards of 0: {type(error).__name__}: {error}; it is called with a "
            f"dictionary of the rewards {', '.join(names)}"
        ) from error
    if as_number(value) is None:
        raise ConfigError(f"--reward-combine {name}: returned {shorten(repr(value))}; return a finite number")
    return function


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # written in C
        return []


def _of_tensors(function: Callable[..., Any], own_names: Mapping[str, str]) -> Combine:
    """Return a function of rewards by short name that calls RL4LLM's."""

    def combine(rewards: Mapping[str, float]) -> Any:
        import torch  # the function needs it, others do without

        return function({own: torch.tensor([float(rewards[short])]) for short, own in own_names.items()})

    return combine
