"""Plot a run's learning curve.

    python scripts/plot_reward_curve.py RUN_DIR [--output FILE.png]

In: RUN_DIR/metrics.jsonl (one object per optimizer step) and, if there is one, RUN_DIR/eval/summary.jsonl (one object
per evaluation and task). Out: RUN_DIR/reward_curve.png with the mean reward and answer accuracy of the rollouts, and
the held-out accuracy.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # write files without opening a window
from matplotlib import pyplot

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Read a JSON Lines file. Raises: SystemExit with a message for a missing or invalid one."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
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


def draw(metrics: list[Row], evaluations: list[Row], output: Path, *, title: str) -> None:
    """Write the figure: rollout curves as lines, evaluations as lines with points."""
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for key, label in (("reward_mean", "reward (rollouts)"), ("answer_accuracy", "answer accuracy (rollouts)")):
        points = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
        axes.plot(*zip(*points, strict=True) if points else ([], []), label=label, linewidth=1, alpha=0.8)
    for task, curve in accuracy_by_task(evaluations).items():
        axes.plot(*zip(*curve, strict=True), marker="o", linewidth=2, label=f"greedy accuracy ({task}, held out)")
    axes.set(xlabel="optimizer step", ylabel="mean", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(output, dpi=120)
    pyplot.close(figure)


def main() -> None:
    """Read the run's files and plot them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--output", type=Path, help="figure to write (default: RUN_DIR/reward_curve.png)")
    arguments = parser.parse_args()
    metrics = read_rows(arguments.run_dir / "metrics.jsonl")
    if not metrics:
        raise SystemExit(f"{arguments.run_dir / 'metrics.jsonl'}: no optimizer step is recorded yet")
    summary = arguments.run_dir / "eval" / "summary.jsonl"
    output = arguments.output or arguments.run_dir / "reward_curve.png"
    draw(metrics, read_rows(summary) if summary.exists() else [], output, title=arguments.run_dir.name)
    print(output)


if __name__ == "__main__":
    main()
