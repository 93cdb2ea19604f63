"""Say what a run's files have gained since a page read them; the page keeps the positions, the server nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coati_rl.observability.sinks import METRICS
from coati_rl.report.curves import SAMPLES, evaluation_points, num_samples, rounded, speed
from coati_rl.report.page import html_page
from coati_rl.report.rollouts import read_step
from coati_rl.report.run_data import add_steps, keys_of, page_data, read_runs, shown_note
from coati_rl.report.tokens import load_tokenizer
from coati_rl.run_reader.json_lines import StalePositionError, end_of_lines, read_new_lines
from coati_rl.run_reader.run_directory import ANNOTATIONS, RunDirectory

_STEP_BYTES = 400_000  # of a step's rollouts in a page that asks for one at a time


def live_page(run: RunDirectory) -> bytes:
    """Return the page of a run as it is now, with the positions from which it asks for more.

    They are taken first: the page leaves out what it has already. Raises: ConfigError if the run cannot be read.
    """
    positions = {name: end_of_lines(file) for name, file in _files(run).items()}
    (read,) = read_runs([run.path])
    data = page_data([read])
    last = run.last_rollout_step()
    add_steps(read, data["runs"][0], [] if last is None else [last], _STEP_BYTES)
    return html_page({**data, "live": {"positions": positions}}, title=read.label, is_live=True)


def changes(run: RunDirectory, positions: Mapping[str, str]) -> dict[str, Any]:
    """Return the steps, evaluations and notes behind the positions, and the new positions.

    Raises: ConfigError if the run cannot be read.
    """
    try:
        found = {name: read_new_lines(file, positions.get(name, "")) for name, file in _files(run).items()}
    except StalePositionError:
        return {"is_rewritten": True}
    records, summaries, notes = (lines for lines, _ in found.values())
    saved = run.checkpoints()
    group_size = int(run.config().get("num_generations") or 1) if records else 1
    return {
        "is_rewritten": False,
        "is_running": run.is_running(),
        "checkpoint": saved[-1].name if saved else None,
        "positions": {name: position for name, (_, position) in found.items()},
        "steps": [_step(record, group_size) for record in records],
        "evaluations": evaluation_points(summaries),
        "annotations": [shown_note(each) for each in notes],
    }


def step_rollouts(run: RunDirectory, step: int) -> dict[str, Any]:
    """Return the groups and rollouts of a step. Raises: ConfigError if the run cannot be read."""
    noted = keys_of(run.annotations())
    found = read_step(run, step, max_bytes=_STEP_BYTES, tokenizer=load_tokenizer(run), noted=noted)
    return {"groups": found.groups, "rollouts": found.rollouts}


def _files(run: RunDirectory) -> dict[str, Path]:
    """Return the files whose lines come to a page, by what they are called there."""
    return {
        "steps": run.path / METRICS,
        "evaluations": run.evaluation_summary,
        "annotations": run.path / ANNOTATIONS,
    }


def _step(record: Mapping[str, Any], group_size: int) -> dict[str, Any]:
    """Return the numbers of a record; its samples are those of the step alone, which the page adds up."""
    numbers = {key: value for key, value in record.items() if isinstance(value, int | float)} | speed(record)
    return {key: rounded(value) for key, value in numbers.items()} | {SAMPLES: num_samples(record, group_size)}
