"""Define the interface of a reward, which gives each response to a problem a score."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from coati_rl.text import shorten
from coati_rl.types import MAX_REWARD, Problem, Score


class RewardFn(Protocol):
    """Score one response of a policy.

    Pure and deterministic, so that a sample can be scored again after a worker died. It never raises because of a
    response's text: if it cannot decide, the verdict is "invalid".
    """

    def __call__(self, response: str, ground_truth: str) -> Score:
        """Score `response`; `ground_truth` is the row's text: an answer (or, for rewards that run code, JSON tests)."""


class Reward(Protocol):
    """Score the responses to a problem.

    A reward is made in one process and scores in forks of it: threads, processes and connections must be created by the
    first call of `score`. Optional members: `warm_up()`, see below; `is_fast`: scoring takes hardly longer than sending
    the request; `is_concurrent`: the responses of a call are scored at the same time; `only_computes`: it scores one
    response at a time, never waits, and needs little memory, so that CPU time and memory can be limited.
    """

    is_batch: bool  # all responses are scored in one call, with one time limit and one failure

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """Yield one score per response, in order, each as soon as it is known. A failure is an invalid score."""


# With tags and box, for any math reward. math-verify is slow with the first use of a notation: a square root takes
# 0.3 s the first time, then 3 ms.
_EXAMPLES = tuple(
    rf"<answer>{answer}</answer> \boxed{{{answer}}}"
    for answer in (r"\frac{1}{2}", r"2\sqrt{3}+1", "(1, 2)", "[0, 1)", r"x^2+3x=0", r"\{1,2\}", r"50\%", "3.14")
)


class ResponseReward:
    """Implement `Reward` with a fast function of one response's text."""

    is_batch = False
    is_fast = True  # ordinary answers take 0.1 to 30 ms
    only_computes = True

    def __init__(self, reward_fn: RewardFn) -> None:
        self._reward_fn = reward_fn

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        for response in responses:
            yield score_safely(self._reward_fn, response, problem.ground_truth)

    def warm_up(self) -> None:
        """See `warm_up`."""
        for response in _EXAMPLES:
            score_safely(self._reward_fn, response, r"\frac{3}{7}")


def warm_up(reward: Reward) -> None:
    """Call the reward's `warm_up()`, if it has one, before the first response is scored.

    It imports libraries and fills caches; it must not leave threads, processes or connections, since forks follow.
    """
    getattr(reward, "warm_up", lambda: None)()


def only_computes(reward: Reward) -> bool:
    """Return True if the scoring process is limited in CPU time and memory, and not in wall-clock time."""
    return bool(getattr(reward, "only_computes", False))


def score_safely(reward_fn: RewardFn, response: str, ground_truth: str) -> Score:
    """Score one response; an exception of the reward function becomes an invalid score with its message."""
    try:
        return reward_fn(response, ground_truth)
    except Exception as error:  # noqa: BLE001 - a failed reward is counted as invalid, never as zero
        return invalid_score(f"the reward failed: {type(error).__name__}: {shorten(error)}")


def bounded(score: Score) -> Score:
    """Return the score, or an invalid one if its reward is NaN or so large that group statistics would overflow."""
    if score.verdict == "invalid" or abs(score.reward) <= MAX_REWARD:
        return score
    return invalid_score(f"a reward of {score.reward:g} cannot be trained on; return at most {MAX_REWARD:g} in size")


def invalid_score(detail: str) -> Score:
    """Return the score of a response that could not be judged."""
    return Score(reward=0.0, answer_correct=False, format_valid=False, verdict="invalid", detail=detail)
