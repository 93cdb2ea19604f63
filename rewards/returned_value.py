"""Convert what a function of the user's returned (numbers, tensors, dicts, scores) to scores.

Full marks are right: unless it is told, an answer is correct when its reward is at least 1 (of an OpenRLHF function
with "scores": when its score is). A format is valid unless it is said not to be.

Whatever is no finite number, None included, is an invalid score whose detail says what came back; so is a number too
large to train on. Tensors and arrays are known by what they can do, so that neither torch nor NumPy is imported.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from coati_rl.text import shorten
from coati_rl.types import Score, Verdict
from rewards.reward import bounded, invalid_score

RIGHT_FROM = 1.0

_OF_A_RESPONSE = "return a finite number, a Score, or a dict with a reward"
_OF_A_GROUP = 'return a reward for each, or a dict with such "rewards"'
_MEANINGS = ("reward", "answer_correct", "format_valid", "detail")  # keys of a dict; others are reported


def as_score(value: object) -> Score:
    """The score that a value for one response means."""
    if isinstance(value, Score):
        return bounded(_checked(value))
    if isinstance(value, Mapping):
        return bounded(_from_dict(value))
    reward = as_number(value)
    if reward is None:
        return invalid_score(f"returned {_shown(value)}; {_OF_A_RESPONSE}")
    return bounded(_score(reward, is_correct=reward >= RIGHT_FROM))


def as_scores(value: object, num_responses: int) -> list[Score]:
    """The scores that a value for a whole group means: one for each response, whatever it is.

    Args:
        value: a list, array or tensor of rewards; or {"rewards": such, "scores"?: such, "extra_logs"?: {name: such}}.
        num_responses: responses in the group (G).
    """
    parts: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"rewards": value}
    rewards = _items(parts.get("rewards"))
    if rewards is None or len(rewards) != num_responses:
        came = _shown(value) if rewards is None else f"{len(rewards)} rewards"
        return [invalid_score(f"returned {came} for {num_responses} responses; {_OF_A_GROUP}")] * num_responses
    scores = [as_score(reward) for reward in rewards]
    if parts.get("scores") is not None:
        marks = _items(parts["scores"])
        if marks is None or len(marks) != num_responses:
            came = _shown(parts["scores"]) if marks is None else f"{len(marks)}"
            return [invalid_score(f'returned {came} as "scores" of {num_responses} responses')] * num_responses
        scores = [_with_mark(score, mark) for score, mark in zip(scores, marks, strict=True)]
    logs = parts.get("extra_logs")
    return _with_logs(scores, logs) if isinstance(logs, Mapping) else scores


def as_number(value: object) -> float | None:
    """The finite number that a bool, a number, or an array or tensor of one element is; else None."""
    item = getattr(value, "item", None)
    if callable(item) and not isinstance(value, int | float):
        try:
            value = item()
        except (TypeError, ValueError, RuntimeError):  # more than one element
            return None
    if not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _from_dict(value: Mapping[Any, Any]) -> Score:
    reward = as_number(value.get("reward"))
    correct, valid = (value.get(key) for key in ("answer_correct", "format_valid"))
    correct = reward if correct is None else as_number(correct)
    valid = 1.0 if valid is None else as_number(valid)
    if reward is None or correct is None or valid is None:
        return invalid_score(f"returned {_shown(value)}; {_OF_A_RESPONSE}")
    return Score(
        reward=reward,
        answer_correct=correct >= RIGHT_FROM,
        format_valid=bool(valid),
        verdict="ok" if correct >= RIGHT_FROM else "wrong",
        detail=shorten(value.get("detail", ""), 300),
        breakdown=_numbers({key: other for key, other in value.items() if key not in _MEANINGS}),
    )


def _checked(score: Score) -> Score:
    """A score of the user's own making, in plain types: it travels as JSON."""
    if score.verdict not in get_args(Verdict):
        return invalid_score(f"returned a Score with the verdict {score.verdict!r}; use ok, wrong or invalid")
    reward = as_number(score.reward)
    if reward is None and score.verdict != "invalid":
        return invalid_score(f"returned a Score with the reward {_shown(score.reward)}; {_OF_A_RESPONSE}")
    return Score(
        reward=reward or 0.0,
        answer_correct=bool(score.answer_correct),
        format_valid=bool(score.format_valid),
        verdict=score.verdict,
        detail=shorten(score.detail, 300),
        breakdown=_numbers(score.breakdown),
        filter_score=as_number(score.filter_score),
    )


def _score(reward: float, *, is_correct: bool) -> Score:
    verdict: Verdict = "ok" if is_correct else "wrong"
    return Score(reward=reward, answer_correct=is_correct, format_valid=True, verdict=verdict)


def _with_mark(score: Score, mark: object) -> Score:
    """The score, where the mark (0-1) decides what is correct, and is what --filter-range looks at."""
    if score.verdict == "invalid":
        return score
    number = as_number(mark)
    if number is None:
        return invalid_score(f'returned {_shown(mark)} among its "scores"; return finite numbers')
    is_correct = number >= RIGHT_FROM
    return replace(score, answer_correct=is_correct, verdict="ok" if is_correct else "wrong", filter_score=number)


def _with_logs(scores: list[Score], logs: Mapping[Any, Any]) -> list[Score]:
    """The scores with what is logged beside them: a value for each, or one for all."""
    with_logs = []
    for index, score in enumerate(scores):
        values = {name: _value_of(log, index, len(scores)) for name, log in logs.items()}
        with_logs.append(replace(score, breakdown={**score.breakdown, **_numbers(values)}))
    return with_logs


def _value_of(log: object, index: int, num_responses: int) -> object:
    items = _items(log)
    if items is None:
        return log
    return items[index] if len(items) == num_responses else None


def _items(value: object) -> list[Any] | None:
    """The elements of a list, tuple, array or tensor; None for anything else, a number included."""
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        value = tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Those that are finite numbers, by name."""
    numbers = {str(name): as_number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _shown(value: object) -> str:
    return f"{shorten(repr(value))} ({type(value).__name__})" if value is not None else "None"
