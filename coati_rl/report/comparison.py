"""Compare runs: figures at equal steps and at equal samples, settings, and which differ in the seed alone."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coati_rl.report.charts import CHARTS
from coati_rl.report.curves import Curves, rounded

_LAST_STEPS = 10  # whose mean is a run's value at a point
_SEED = "seed"
_PLACES = ("run_dir", "project", "save_dir", "eval_save_dir", "rollout_save_dir", "master_port", "template_date", _SEED)


def summary_rows(curves: Curves, evaluations: Mapping[str, Sequence[tuple[int, Any]]]) -> list[dict[str, Any]]:
    """Return first, best and last value of a run's main figures; those of evaluations first."""
    rows = []
    steps = curves.column("step")
    for chart in CHARTS:
        if not chart.better:
            continue
        for name, points in evaluations.items():
            if name.split("/", 2)[-1] in chart.evaluations:
                rows.append(_row(name, chart.better, [(s, v) for s, v in points if v is not None]))
        for key in chart.keys:
            values = curves.column(key)
            rows.append(
                _row(
                    key, chart.better, [(int(steps[i]), float(values[i])) for i in np.flatnonzero(np.isfinite(values))]
                )
            )
    told = [row for number, row in enumerate(rows) if row and not _says_nothing(row, rows[:number], curves)]
    return sorted(told, key=lambda row: not row["name"].startswith("eval/"))


def _says_nothing(row: Mapping[str, Any], before: Sequence[Mapping[str, Any]], curves: Curves) -> bool:
    """Return True for the loss of a policy gradient, whose size means nothing, and an accuracy that is the reward."""
    is_policy_loss = row["name"] == "loss" and "reward_mean" in curves.figures()
    figures = {key: value for key, value in row.items() if key != "name"}
    is_twin = any(figures == {key: value for key, value in each.items() if key != "name"} for each in before)
    return is_policy_loss or is_twin


def _row(name: str, better: str, points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    if not points:
        return {}
    sign = 1 if better == "up" else -1
    step, best = max(points, key=lambda each: (sign * each[1], -each[0]))
    first, last = points[0][1], points[-1][1]
    values = {"first": rounded(first), "best": rounded(best), "best_step": step, "last": rounded(last)}
    return {"name": name, "better": better, **values}


def at_equal(
    axis: str, runs: Sequence[Curves], evaluations: Sequence[Mapping[str, Sequence[tuple[int, Any]]]]
) -> dict[str, Any]:
    """Return the figures of runs at the last place of an axis that all have reached.

    A value is the mean of the last ten steps up to there; that of an evaluation is its last one up to there.

    Args:
        axis: "step" or "samples".
    """
    ends = [np.nanmax(each.column(axis)) if each.num_steps else 0.0 for each in runs]
    limit = min(ends, default=0.0)
    rows: dict[str, list[float | int | None]] = {}
    for number, (curves, points) in enumerate(zip(runs, evaluations, strict=True)):
        for name, value in _values_at(curves, points, curves.column(axis) <= limit).items():
            rows.setdefault(name, [None] * len(runs))[number] = rounded(value)
    ordered = sorted(rows.items(), key=lambda row: not row[0].startswith("eval/"))
    return {"axis": axis, "limit": rounded(limit), "rows": [{"name": name, "values": row} for name, row in ordered]}


def _values_at(
    curves: Curves, points: Mapping[str, Sequence[tuple[int, Any]]], reached: np.ndarray
) -> dict[str, float]:
    is_policy = "reward_mean" in curves.figures()
    main = [chart for chart in CHARTS if chart.better and not (is_policy and "loss" in chart.keys)]
    last_step = np.nanmax(curves.column("step")[reached]) if reached.any() else 0
    found = {}
    for key in (key for chart in main for key in chart.keys):
        values = curves.column(key)[reached]
        if (known := values[np.isfinite(values)]).size:
            found[key] = float(known[-_LAST_STEPS:].mean())
    for name, each in points.items():
        before = [value for step, value in each if step <= last_step and value is not None]
        if before and any(name.split("/", 2)[-1] in chart.evaluations for chart in main):
            found[name] = before[-1]
    return found


def different_settings(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of settings whose values are not the same in all runs."""
    names = {name: None for config in configs for name in config}
    return [name for name in names if any(each.get(name) != configs[0].get(name) for each in configs)]


def seed_groups(configs: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the numbers of the runs in groups whose settings differ in nothing but seed and places of files."""
    groups: list[list[int]] = []
    for number, config in enumerate(configs):
        same = next((group for group in groups if _differ_in_seed(configs[group[0]], config)), None)
        if same is None:
            groups.append([number])
        else:
            same.append(number)
    return groups


def _differ_in_seed(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return set(different_settings([one, other])) <= set(_PLACES) and one.get(_SEED) != other.get(_SEED)
