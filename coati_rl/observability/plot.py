"""Plot the learning curves of runs: `coati-rl plot RUN...`.

In: metrics.jsonl and eval/summary.jsonl of each run directory. Out: one figure, with the rewards and accuracies of runs
with producers, and the losses of jobs on a dataset, in an axis for each kind of figure.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from coati_rl.errors import ConfigError
from coati_rl.observability.records import events_in
from coati_rl.observability.run_summary import RunSummary
from coati_rl.observability.sinks import METRICS

Curves = Mapping[str, Sequence[tuple[int, float]]]  # by name of the figure: steps and values
_REWARDS = "reward and accuracy"
_LOSSES = "loss"
_KL = "KL, nats per token"
_PROG = "coati-rl plot"


def curves_of(run_dir: Path) -> Curves:
    """Return the main figures of a run, as its end's table names them.

    Raises: ConfigError for a directory without metrics.jsonl, without a step, or whose files cannot be read.
    """
    summary = RunSummary()
    try:
        if not (run_dir / METRICS).is_file():
            raise ConfigError(f"{run_dir}: has no {METRICS}; give the directory of a run")
        for event in events_in(run_dir / METRICS, run_dir / "eval"):
            summary.recall(event)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{run_dir}: its {METRICS} or eval/summary.jsonl cannot be read: {error}") from error
    if not summary.has_figures:
        raise ConfigError(f"{run_dir}: no step and no evaluation is recorded yet")
    return summary.curves


def axis_of(name: str) -> str:
    """Return the title of the axis that a figure is drawn on."""
    last = name.replace("/", " ").split()[-1]
    return {"loss": _LOSSES, "KL": _KL}.get(last, _REWARDS)


def labelled(runs: Sequence[Path]) -> dict[Path, str]:
    """Return what tells the runs apart: their names, or their paths where two have the same name."""
    names = [run.resolve().name for run in runs]
    return {run: str(run) if names.count(name) > 1 else name for run, name in zip(runs, names, strict=True)}


def draw(runs: Mapping[str, Curves], output: Path) -> None:
    """Write the figure: steps as thin lines, evaluations with points.

    Args:
        runs: by label.
        output: whose suffix chooses the format.
    Raises: ConfigError if the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")  # write files without opening a window
    from matplotlib import pyplot

    drawn = [(label, name, points) for label, curves in runs.items() for name, points in curves.items()]
    titles = [title for title in (_REWARDS, _LOSSES, _KL) if any(axis_of(name) == title for _, name, _ in drawn)]
    figure, grid = pyplot.subplots(1, len(titles), figsize=(8 * len(titles), 4.5), layout="constrained", squeeze=False)
    axes = dict(zip(titles, grid[0], strict=True))
    for label, name, points in drawn:
        is_evaluation = name.startswith("eval/")
        style = {"marker": "o", "linewidth": 2} if is_evaluation else {"linewidth": 1, "alpha": 0.8}
        axis = axes[axis_of(name)]
        shown = name if len(runs) == 1 else f"{label}: {name}"
        axis.plot(*zip(*sorted(points), strict=True), label=shown, **style)
    for title, axis in axes.items():
        axis.set(xlabel="optimizer step", ylabel=title, title=next(iter(runs)) if len(runs) == 1 else "")
        axis.grid(alpha=0.3)
        axis.legend()
    try:
        figure.savefig(output, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"-o {output}: cannot be written: {error}") from error
    finally:
        pyplot.close(figure)


def main(arguments: Sequence[str]) -> int:
    """Run `plot` and return its exit code: 2 for invalid arguments, as for a directory that is no run's."""
    parser = argparse.ArgumentParser(prog=_PROG, description="Plot the learning curves of runs in one figure.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="directory of a run")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE.png",
        help="figure to write; default for one run: reward_curve.png in its directory, or loss_curve.png for a job on "
        "a dataset",
    )
    parsed = parser.parse_args(arguments)
    try:
        if parsed.output is None and len(parsed.runs) > 1:
            raise ConfigError("several runs are drawn in one figure: name it with -o FILE.png")
        runs = {label: curves_of(run) for run, label in labelled(parsed.runs).items()}
        output = parsed.output or parsed.runs[0] / default_name(next(iter(runs.values())))
        draw(runs, output)
    except ConfigError as error:
        sys.stderr.write(f"{_PROG}: {error}\n")
        return 2
    sys.stdout.write(f"{output}\n")
    return 0


def default_name(curves: Curves) -> str:
    """Return the name of a run's own figure."""
    return "loss_curve.png" if any(axis_of(name) == _LOSSES for name in curves) else "reward_curve.png"
