"""Combine several rewards into one: the weighted sum of their scores, with a breakdown.

reward = sum of weight x reward. Verdict, correctness, format, detail and the value that --filter-range filters are
those of the first reward; if any of them is invalid, the score is invalid.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from coati_rl.types import Problem, Score
from rewards.reward import Reward, bounded, invalid_score, only_computes, warm_up


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedPart:
    """Hold a reward with its name and weight."""

    name: str  # short; the key in the breakdown
    weight: float
    reward: Reward


class WeightedReward:
    """Implement `Reward` as a weighted sum of at least one part."""

    def __init__(self, parts: Sequence[WeightedPart]) -> None:
        self._parts = tuple(parts)
        self.is_batch = any(part.reward.is_batch for part in parts)
        self.is_concurrent = any(getattr(part.reward, "is_concurrent", False) for part in parts)
        self.only_computes = all(only_computes(part.reward) for part in parts)
        self.is_fast = all(getattr(part.reward, "is_fast", False) for part in parts)

    def warm_up(self) -> None:
        """See `rewards.reward.warm_up`."""
        for part in self._parts:
            warm_up(part.reward)

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """See `Reward.score`."""
        for scores in zip(*(part.reward.score(responses, problem) for part in self._parts), strict=True):
            yield self._sum(scores)

    def _sum(self, scores: Sequence[Score]) -> Score:
        pairs = [*zip(self._parts, scores, strict=True)]
        undecided = [f"{part.name}: {score.detail}" for part, score in pairs if score.verdict == "invalid"]
        if undecided:
            return invalid_score("; ".join(undecided))
        breakdown: dict[str, float] = {}
        for part, score in pairs:
            breakdown[part.name] = score.reward
            breakdown.update({f"{part.name}/{name}": value for name, value in score.breakdown.items()})
        first = scores[0]
        score = Score(
            reward=sum(part.weight * score.reward for part, score in pairs),
            answer_correct=first.answer_correct,
            format_valid=first.format_valid,
            verdict=first.verdict,
            detail=first.detail,
            breakdown=breakdown,
            filter_score=first.reward if first.filter_score is None else first.filter_score,
        )
        return bounded(score)
