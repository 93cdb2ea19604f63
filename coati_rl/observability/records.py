"""Build and parse the JSON lines that a run writes: a sample's score, and the step of a line."""

import json
import math
from collections.abc import Mapping
from typing import Any

from coati_rl.types import Score

_MAX_TRUTH_LENGTH = 2000  # characters: the tests of a program may be megabytes, and a line is written for each sample


_SETTINGS = ("step", "temperature")  # numbers of an evaluation that are no figures of it


def score_fields(score: Score) -> dict[str, Any]:
    """Return a score's fields of a line; breakdown and filter score only if present. NaN becomes null."""
    fields: dict[str, Any] = {
        "reward": _number(score.reward),
        "answer_correct": score.answer_correct,
        "format_valid": score.format_valid,
        "verdict": score.verdict,
        "detail": score.detail,
    }
    if score.breakdown:
        fields["breakdown"] = {name: _number(value) for name, value in score.breakdown.items()}
    if score.filter_score is not None:
        fields["filter_score"] = _number(score.filter_score)
    return fields


def evaluation_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of an evaluation set's summary by their names in charts: eval/SET/accuracy, eval/SET/loss.

    Those of a task, in a set that has several, are eval/SET/TASK/accuracy, ...
    """
    name = f"eval/{summary['task']}"
    figures = {name: summary} | {f"{name}/{task}": each for task, each in summary.get("by_task", {}).items()}
    return {
        f"{where}/{key}": value
        for where, values in figures.items()
        for key, value in values.items()
        if isinstance(value, int | float) and not key.startswith("num_") and key not in _SETTINGS
    }


def shown_truth(ground_truth: str) -> str:
    """Return the ground truth, shortened."""
    is_long = len(ground_truth) > _MAX_TRUTH_LENGTH
    return f"{ground_truth[:_MAX_TRUTH_LENGTH]}..." if is_long else ground_truth


def step_of_record(line: str) -> int | None:
    """Return the "step" of a line; None if it has none, or is incomplete, as a killed run may leave the last one."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
