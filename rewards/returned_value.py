"""Convert the return value of a user's function (numbers, tensors, dicts, scores) to scores.

An answer is correct if the function says so ("answer_correct"; for an OpenRLHF function with "scores", a score of at
least 1), else if its reward is at least `correct_from` of the task (default 1). By default its format is valid.

A value that is not a finite number, None included, or too large to train on becomes an invalid score whose detail shows
the value. Tensors and arrays are recognised by their methods, so that neither torch nor NumPy is imported.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from coati_rl.text import shorten
from coati_rl.types import Score, Verdict
from rewards.reward import bounded, invalid_score

CORRECT_FROM = 1.0

_OF_A_RESPONSE = "return a finite number, a Score, or a dict with a reward"
_OF_A_GROUP = 'return a reward for each, or a dict with such "rewards"'
_KNOWN_KEYS = ("reward", "answer_correct", "format_valid", "detail")  # of a dict; numbers of other keys are reported


def as_score(value: object, *, correct_from: float = CORRECT_FROM) -> Score:
    """Convert the return value for one response to a score.

    Args:
        value: of the user's function.
        correct_from: reward that makes an answer correct if the value does not say whether it is.
    """
    if isinstance(value, Score):
        return bounded(_checked(value))
    if isinstance(value, Mapping):
        return bounded(_from_dict(value, correct_from))
    reward = as_number(value)
    if reward is None:
        return invalid_score(f"returned {_shown(value)}; {_OF_A_RESPONSE}")
    return bounded(_score(reward, is_correct=reward >= correct_from))


def as_scores(value: object, num_responses: int, *, correct_from: float = CORRECT_FROM) -> list[Score]:
    """Convert the return value for a whole group to scores, always one for each response.

    Args:
        value: rewards, a list, array or tensor; or {"rewards": ..., "scores": ..., "extra_logs": {name: ...}} with
            such values, of which the last two are optional.
        num_responses: responses in the group (G).
        correct_from: as of `as_score`.
    """
    parts: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"rewards": value}
    rewards = _items(parts.get("rewards"))
    if rewards is None or len(rewards) != num_responses:
        came = _shown(value) if rewards is None else f"{len(rewards)} rewards"
        return [invalid_score(f"returned {came} for {num_responses} responses; {_OF_A_GROUP}")] * num_responses
    scores = [as_score(reward, correct_from=correct_from) for reward in rewards]
    if parts.get("scores") is not None:
        values = _items(parts["scores"])
        if values is None or len(values) != num_responses:
            came = _shown(parts["scores"]) if values is None else f"{len(values)}"
            return [invalid_score(f'returned {came} as "scores" of {num_responses} responses')] * num_responses
        scores = [_with_score(score, value) for score, value in zip(scores, values, strict=True)]
    logs = parts.get("extra_logs")
    return _with_logs(scores, logs) if isinstance(logs, Mapping) else scores


def as_number(value: object) -> float | None:
    """Return a bool, a number, or an array or tensor of one element as a finite float; None for other values."""
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


def _from_dict(value: Mapping[Any, Any], correct_from: float) -> Score:
    reward = as_number(value.get("reward"))
    correct, valid = (value.get(key) for key in ("answer_correct", "format_valid"))
    least = correct_from if correct is None else CORRECT_FROM
    correct = reward if correct is None else as_number(correct)
    valid = 1.0 if valid is None else as_number(valid)
    if reward is None or correct is None or valid is None:
        return invalid_score(f"returned {_shown(value)}; {_OF_A_RESPONSE}")
    return Score(
        reward=reward,
        answer_correct=correct >= least,
        format_valid=bool(valid),
        verdict="ok" if correct >= least else "wrong",
        detail=shorten(value.get("detail", ""), 300),
        breakdown=_numbers({key: other for key, other in value.items() if key not in _KNOWN_KEYS}),
    )


def _checked(score: Score) -> Score:
    """Check a Score made by the user, and convert its fields to plain types for JSON."""
    if score.verdict not in get_args(Verdict):
        return invalid_score(f"returned a Score with the verdict {score.verdict!r}; use ok, wrong or invalid")
    reward = as_number(score.reward)
    if reward is None and score.verdict != "invalid":
        return invalid_score(f"returned a Score with the reward {_shown(score.reward)}; {_OF_A_RESPONSE}")
    return Score(
        reward=reward or 0.0,
        answer_correct=bool(score.answer_correct) and score.verdict != "invalid",  # undecided: counted as not correct
        format_valid=bool(score.format_valid),
        verdict=score.verdict,
        detail=shorten(score.detail, 300),
        breakdown=_numbers(score.breakdown),
        filter_score=as_number(score.filter_score),
    )


def _score(reward: float, *, is_correct: bool) -> Score:
    verdict: Verdict = "ok" if is_correct else "wrong"
    return Score(reward=reward, answer_correct=is_correct, format_valid=True, verdict=verdict)


def _with_score(score: Score, value: object) -> Score:
    """Return the score with OpenRLHF's score (0 to 1), which decides correctness and is filtered by --filter-range."""
    if score.verdict == "invalid":
        return score
    number = as_number(value)
    if number is None:
        return invalid_score(f'returned {_shown(value)} among its "scores"; return finite numbers')
    is_correct = number >= CORRECT_FROM
    return replace(score, answer_correct=is_correct, verdict="ok" if is_correct else "wrong", filter_score=number)


def _with_logs(scores: list[Score], logs: Mapping[Any, Any]) -> list[Score]:
    """Add logged values to the scores' breakdowns: a value for each response, or one for all."""
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
    """Return the elements of a list, tuple, array or tensor; None for other values, numbers included."""
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        value = tolist()
    return list(value) if isinstance(value, list | tuple) else None


def _numbers(values: Mapping[Any, Any]) -> dict[str, float]:
    """Return the values that are finite numbers, by name."""
    numbers = {str(name): as_number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _shown(value: object) -> str:
    return f"{shorten(repr(value))} ({type(value).__name__})" if value is not None else "None"
