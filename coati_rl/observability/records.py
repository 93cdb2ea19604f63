"""Build and parse the JSON lines that a run writes: a sample's score, and the step of a line."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from coati_rl.types import Score

_MAX_TRUTH_LENGTH = 2000  # characters: the tests of a program may be megabytes, and a line is written for each sample


MACHINE = "machine.jsonl"  # in the run directory: the machine and the packages of each start
CONVERSATIONS = "conversations"  # in an environment's record of an episode: what is said in each of its trajectories
_SETTINGS = ("step", "temperature", "correct_from")  # numbers of an evaluation that are no figures of it


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


def conversation_fields(record: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the fields of a line that hold the whole conversation of an episode's trajectory, to be read.

    Args:
        record: of the environment; one without conversations gives no fields.
        number: of the trajectory in its episode; -1: the last.
    """
    conversations = record.get(CONVERSATIONS) or []
    if not -len(conversations) <= number < len(conversations):
        return {}
    said = conversations[number]
    return {"text": said} if isinstance(said, str) else {"messages": said}


def without_conversations(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment's record of an episode without what `conversation_fields` returns."""
    return {key: value for key, value in record.items() if key != CONVERSATIONS}


def evaluation_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of an evaluation set's summary by their names in charts: eval/SET/accuracy, eval/SET/loss.

    Those of a task, in a set that has several, are eval/SET/TASK/accuracy, ...
    """
    return {name: value for name, value in evaluation_figures(summary).items() if value is not None}


def evaluation_figures(summary: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of `evaluation_metrics`, and those without a value: None where no answer has a verdict."""
    name = f"eval/{summary['task']}"
    figures = {name: summary} | {f"{name}/{task}": each for task, each in summary.get("by_task", {}).items()}
    return {
        f"{where}/{key}": value
        for where, values in figures.items()
        for key, value in values.items()
        if isinstance(value, int | float | None) and not key.startswith("num_") and key not in _SETTINGS
    }


def events_in(metrics: Path, evaluation: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of steps, then those of evaluations, that a run has written, but for lines that are cut off.

    Args:
        metrics: metrics.jsonl.
        evaluation: directory of summary.jsonl.
    """
    for kind, path in (("step", metrics), ("evaluation", evaluation / "summary.jsonl")):
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        for line in lines:
            if step_of_record(line) is not None:
                yield {**json.loads(line), "event": kind}


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
