"""Read the JSON Lines that runs write, for the reports of examples."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Read a JSON Lines file. Raises: SystemExit with a message for a missing or invalid one."""
    try:
        lines = path.read_text(encoding="utf-8").strip("\n").split("\n")  # a text may hold other line ends
    except OSError as error:
        raise SystemExit(f"{path}: cannot be read ({error.strerror}); give the folder of a run") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise SystemExit(f"{path}:{number}: the line is not JSON: {error}") from error
    return rows


def accuracy_by_task(rows: list[Row]) -> dict[str, list[tuple[int, float]]]:
    """Group evaluation summaries into one (step, accuracy) curve per task."""
    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        curves[row["task"]].append((row["step"], row["accuracy"]))
    return {task: sorted(points) for task, points in curves.items()}
