"""Read the JSON Lines that runs write, for the reports of examples."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.run_reader.json_lines import read_json_lines

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Read a JSON Lines file. Raises: SystemExit with a message for a missing or invalid one."""
    if not path.is_file():
        raise SystemExit(f"{path}: cannot be read; give the folder of a run")
    try:
        return [*read_json_lines(path)]
    except (OSError, ConfigError) as error:
        raise SystemExit(f"{path}: cannot be read: {error}") from error


def accuracy_by_task(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """Group evaluation summaries into one (step, accuracy) curve per task."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        curves[row["task"]].append((row["step"], row["accuracy"]))
    return {task: sorted(points) for task, points in curves.items()}
