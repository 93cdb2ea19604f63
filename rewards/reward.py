"""Define what a reward is to its scoring process: it gives each response to a problem a score."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from coati_rl.text import shorten
from coati_rl.types import MAX_REWARD, Problem, Score


class RewardFn(Protocol):
    """Scores one response of a policy.

    Pure and deterministic, so that a sample can be scored again after a worker died. It never raises for what a model
    may write: what it cannot decide has the verdict "invalid".
    """

    def __call__(self, response: str, ground_truth: str) -> Score:
        """Score `response`; `ground_truth` is the row's text: an answer (or, for rewards that run code, JSON tests)."""


class Reward(Protocol):
    """Scores the responses to a problem.

    It is made in one process and scores in forks of that: what holds threads, processes or connections is made with the
    first score. It may have more: `warm_up()`, see below; `is_fast`: a response takes hardly longer than to ask for its
    score; `is_concurrent`: the responses of a call are scored at the same time; `only_computes`: it scores one response
    at a time, never waits, and needs little memory, so that CPU time and memory are what is limited.
    """

    is_batch: bool  # all responses are scored in one call: they share one time limit, and one failure

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """One score per response, in order, each as soon as it is known. Whatever fails is an invalid score."""


# In both tags and box, for any math reward. math-verify is slow at its first sight of a notation: a square root costs
# 0.3 s, and 3 ms from then on.
_EXAMPLES = tuple(
    rf"<answer>{answer}</answer> \boxed{{{answer}}}"
    for answer in (r"\frac{1}{2}", r"2\sqrt{3}+1", "(1, 2)", "[0, 1)", r"x^2+3x=0", r"\{1,2\}", r"50\%", "3.14")
)


class ResponseReward:
    """A reward that looks at the text of one response at a time, and is fast."""

    is_batch = False
    is_fast = True  # ordinary answers take 0.1 to 30 ms
    only_computes = True

    def __init__(self, reward_fn: RewardFn) -> None:
        self._reward_fn = reward_fn

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """As `Reward.score`."""
        for response in responses:
            yield score_safely(self._reward_fn, response, problem.ground_truth)

    def warm_up(self) -> None:
        """As `warm_up`."""
        for response in _EXAMPLES:
            score_safely(self._reward_fn, response, r"\frac{3}{7}")


def warm_up(reward: Reward) -> None:
    """Pay for the first score before the first response: `warm_up()` of rewards that have it.

    It imports libraries and fills caches, and leaves no thread, process or connection behind: it runs before forks.
    """
    getattr(reward, "warm_up", lambda: None)()


def only_computes(reward: Reward) -> bool:
    """Tell whether CPU time and memory of the process that scores are limited, and not time on the clock."""
    return bool(getattr(reward, "only_computes", False))


def score_safely(reward_fn: RewardFn, response: str, ground_truth: str) -> Score:
    """Score one response; whatever the reward function raises is an invalid score that says so."""
    try:
        return reward_fn(response, ground_truth)
    except Exception as error:  # noqa: BLE001 - a failed reward is data: counted, never a zero
        return invalid_score(f"the reward failed: {type(error).__name__}: {shorten(error)}")


def bounded(score: Score) -> Score:
    """Return the score, or an invalid one if its reward is NaN or so large that group statistics would overflow."""
    if score.verdict == "invalid" or abs(score.reward) <= MAX_REWARD:
        return score
    return invalid_score(f"a reward of {score.reward:g} cannot be trained on; return at most {MAX_REWARD:g} in size")


def invalid_score(detail: str) -> Score:
    """The score of a response about which nothing could be decided."""
    return Score(reward=0.0, answer_correct=False, format_valid=False, verdict="invalid", detail=detail)
