"""Score episodes by the rewards that their environment gave, alone or beside those of a scorer."""

from collections.abc import Sequence
from dataclasses import replace

from coati_rl.types import MAX_REWARD, Score, Trajectory
from producer.environments.returned_steps import ONE_REWARD

_OF_RESPONSE = "response"  # in the breakdown: the reward of -rt


def invalid_episode(detail: str) -> Score:
    """Return the score of an episode that failed: it is masked, and counted."""
    return Score(reward=0.0, answer_correct=False, format_valid=False, verdict="invalid", detail=detail)


def environment_score(
    trajectories: Sequence[Trajectory], *, correct_from: float, filter_score: float | None = None
) -> Score:
    """Return the score of an episode that its environment alone rewards: the sum over its turns.

    Args:
        trajectories: of the episode.
        correct_from: reward from which it counts as correct.
        filter_score: of a Step, which then decides in place of the reward: it is correct from 1 on.
    """
    rewards = _by_name(trajectories)
    total = sum(rewards.values())
    is_correct = total >= correct_from if filter_score is None else filter_score >= 1
    score = Score(
        reward=total,
        answer_correct=is_correct,
        format_valid=True,
        verdict="ok" if is_correct else "wrong",
        breakdown={} if rewards.keys() <= {ONE_REWARD} else rewards,
        filter_score=filter_score,
    )
    return _bounded(score)


def with_environment_rewards(
    score: Score, trajectories: Sequence[Trajectory], *, filter_score: float | None = None
) -> Score:
    """Add the rewards of an episode's turns to the score of its last answer, if it has both.

    A `filter_score` that the environment gave is filtered by; what is correct is as the answer's scorer says.
    """
    rewards = _by_name(trajectories)
    if score.verdict == "invalid":
        return score
    if filter_score is not None:
        score = replace(score, filter_score=filter_score)
    if not rewards:
        return score
    breakdown = {**rewards, _OF_RESPONSE: score.reward, **score.breakdown}
    return _bounded(replace(score, reward=score.reward + sum(rewards.values()), breakdown=breakdown))


def _by_name(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    rewards: dict[str, float] = {}
    for reward in (reward for each in trajectories for reward in each.rewards):
        rewards[reward.name] = rewards.get(reward.name, 0.0) + reward.value
    return rewards


def _bounded(score: Score) -> Score:
    if abs(score.reward) <= MAX_REWARD:
        return score
    return invalid_episode(f"the rewards add up to {score.reward:g}; at most {MAX_REWARD:g} can be trained on")
