"""Collect what the page shows of runs, as JSON; steps of which groups and rollouts are shown are chosen evenly."""

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coati_rl.config.commands import TRAINING
from coati_rl.errors import ConfigError
from coati_rl.observability.plot import labelled
from coati_rl.report.charts import CHARTS, charts_of
from coati_rl.report.comparison import at_equal, different_settings, seed_groups, summary_rows
from coati_rl.report.curves import SAMPLES, Curves, evaluation_points
from coati_rl.report.escaped_json import as_json
from coati_rl.report.rollouts import Key, ReportStep, cut, read_step
from coati_rl.report.time_parts import time_parts
from coati_rl.report.tokens import load_tokenizer
from coati_rl.run_reader.run_directory import RunDirectory

MAX_RUNS = 24
_POINTS = 600  # of the curves of all runs together
_MIN_POINTS = 50
_STEPS = 40  # of which rollouts are shown, over all runs
_SETTING_CHARACTERS = 300
_NOTE_CHARACTERS = 4000
_MAX_NOTES = 200
_MAX_NOTED_STEPS = 20  # that are shown besides those chosen evenly
_MAX_CAUSES = 12
_MAX_PROBLEMS = 8
_GROUPS_SHARE = 0.3  # of the bytes for groups and rollouts


class ReportData:
    """Hold what is read of one run; groups and rollouts are read step by step, by `steps_of`."""

    def __init__(self, path: Path, label: str) -> None:
        """Read the records of the run. Raises: ConfigError if they are none of a run."""
        self.run = RunDirectory(path)
        self.label = label
        self.config = self.run.config()
        self.evaluations = evaluation_points(self.run.evaluations())
        self.curves = Curves(group_size=int(self.config.get("num_generations") or 1))
        for record in self.run.iterate_steps():
            self.curves.add(record)
        notes = self.run.annotations()
        self.num_notes, self.annotations = len(notes), notes[-_MAX_NOTES:]

    def noted(self) -> frozenset[Key]:
        """Return the rollouts that people have noted something of."""
        return keys_of(self.annotations)

    def job(self) -> str:
        """Return the command that has the run's settings, as far as any has."""
        return min(TRAINING, key=lambda name: len(set(TRAINING[name].fields()) ^ set(self.config)))

    def steps_to_show(self, number: int, also: Collection[int] = ()) -> list[int]:
        """Return steps that are evenly apart, the first and the last recorded one among them, and those asked for.

        Later updates of a batch have no rollouts.
        """
        updates = self.curves.column("update")
        steps = self.curves.column("step")[~(updates > 0)].astype(int)
        last = self.run.last_rollout_step()
        steps = steps[steps <= (last or 0)]
        if not len(steps):
            return sorted(also) if last else []
        even = steps[np.unique(np.linspace(0, len(steps) - 1, min(max(number, 1), len(steps))).round().astype(int))]
        noted = sorted({key[0] for key in self.noted()})[-_MAX_NOTED_STEPS:]
        return sorted({*even.tolist(), *also, *noted})

    def fields(self, max_points: int) -> dict[str, Any]:
        """Return all but groups and rollouts."""
        run, steps = self.run, self.curves.column("step")
        saved = run.checkpoints()
        return {
            "label": self.label,
            "job": self.job(),
            "is_running": run.is_running(),
            "first_step": int(steps[0]) if len(steps) else None,
            "last_step": int(steps[-1]) if len(steps) else None,
            "num_steps": self.curves.num_steps,
            "checkpoint": saved[-1].name if saved else None,
            "columns": self.curves.thinned(max_points),
            "constants": self.curves.constants(),
            "sums": self.curves.sums(),
            "evaluations": self.evaluations,
            "summary": summary_rows(self.curves, self.evaluations),
            "time": time_parts(run.path),
            "config": {name: shown(value) for name, value in self.config.items()},
            "starts": [_start(each) for each in run.starts()],
            "resumptions": [{name: shown(value) for name, value in each.items()} for each in run.resumptions()],
            "problems": [cut(line, _SETTING_CHARACTERS) for line in run.problems()[-_MAX_PROBLEMS:]],
            "annotations": [shown_note(each) for each in self.annotations],
            "num_notes": self.num_notes,
        }

    def defaults(self) -> dict[str, str]:
        """Return the settings' values without flags, as the page shows them."""
        return {name: shown(field.default) for name, field in TRAINING[self.job()].fields().items()}


def keys_of(annotations: Iterable[Mapping[str, Any]]) -> frozenset[Key]:
    """Return the rollouts that notes name."""
    keys = ((each.get("step"), each.get("uid"), each.get("sample")) for each in annotations)
    return frozenset(  # a person may have edited them
        (step, uid, sample)
        for step, uid, sample in keys
        if isinstance(step, int) and isinstance(uid, str) and isinstance(sample, int)
    )


def shown(value: Any) -> str:
    """Return a setting's value on the page: text as it is, anything else as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return cut(text, _SETTING_CHARACTERS)


def _start(start: Mapping[str, Any]) -> dict[str, str]:
    """Return the machine and the packages of a start, lists as words."""
    listed = {"gpus": start.get("gpus", []), "packages": [" ".join(each) for each in start.get("packages", {}).items()]}
    return {name: shown(", ".join(listed[name]) if name in listed else value) for name, value in start.items()}


def shown_note(note: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a person has noted of a rollout, as the page shows it."""
    said = {name: cut(str(note.get(name, "")), _NOTE_CHARACTERS) for name in ("time", "text")}
    return {**said, **{name: note.get(name) for name in ("step", "uid", "sample")}}


def read_runs(paths: Sequence[Path]) -> list[ReportData]:
    """Read the records of runs. Raises: ConfigError for one that is none, for the same one twice, and for too many."""
    if len(paths) > MAX_RUNS:
        raise ConfigError(f"{len(paths)} runs: one page shows at most {MAX_RUNS}; give fewer")
    for number, path in enumerate(paths):
        if path.resolve() in {other.resolve() for other in paths[:number]}:
            raise ConfigError(f"{path}: the run is named twice; name it once")
    return [ReportData(path, label) for path, label in labelled(paths).items()]


def page_data(runs: Sequence[ReportData]) -> dict[str, Any]:
    """Return what the page shows of runs but for groups and rollouts, which `steps_of` reads."""
    max_points = max(_MIN_POINTS, _POINTS // max(3, len(runs)))
    keys = {key: None for run in runs for key in run.curves.figures()}
    constants = [run.curves.constants() for run in runs]
    never_differ = [
        key for key in keys if all(key in each and each[key] == constants[0].get(key) for each in constants)
    ]
    configs = [run.config for run in runs]
    curves, evaluations = [run.curves for run in runs], [run.evaluations for run in runs]
    is_compared = len(runs) > 1
    return {
        "runs": [run.fields(max_points) for run in runs],
        "charts": charts_of(keys, never_differ, _changing(evaluations)),
        "constants": {key: constants[0][key] for key in never_differ},
        "defaults": runs[0].defaults(),
        "differences": different_settings(configs) if is_compared else [],
        "seed_groups": seed_groups(configs),
        "comparison": [at_equal(axis, curves, evaluations) for axis in ("step", SAMPLES)] if is_compared else [],
    }


def _changing(evaluations: Sequence[Mapping[str, Sequence[tuple[int, Any]]]]) -> set[str]:
    """Return the figures of evaluations but for those that are the same in all, as sizes are."""
    values: dict[str, set[Any]] = {}
    for each in evaluations:
        for name, points in each.items():
            values.setdefault(name, set()).update(value for _, value in points)
    known = {name for chart in CHARTS for name in chart.evaluations}
    return {name for name, found in values.items() if len(found) > 1 or name.split("/", 2)[-1] in known}


def steps_of(
    run: ReportData, steps: Sequence[int], *, max_bytes: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Read groups and rollouts of steps, within about `max_bytes` on the page.

    Returns: rows of groups; rollouts; what was read and why rollouts could not be scored.
    """
    tokenizer, noted = load_tokenizer(run.run), run.noted()
    found: list[ReportStep] = [
        read_step(run.run, step, max_bytes=max_bytes // len(steps), tokenizer=tokenizer, noted=noted) for step in steps
    ]
    causes = sum((step.causes for step in found), Counter[str]())
    read = {
        "steps": [step for step, each in zip(steps, found, strict=True) if each.num_rollouts],
        "num_rollouts": sum(each.num_rollouts for each in found),
        "causes": causes.most_common(_MAX_CAUSES),
        "has_tokenizer": tokenizer is not None,
    }
    return [row for each in found for row in each.groups], [row for each in found for row in each.rollouts], read


def number_of_steps(runs: Sequence[ReportData], max_bytes: int) -> int:
    """Return of how many steps of each run rollouts are shown: of fewer where answers are long."""
    lengths = [np.nanmax(each) for run in runs if np.isfinite(each := run.curves.column("response_tokens_mean")).any()]
    wanted = 8 * (1500 + 40 * max(lengths, default=0))  # bytes of a step
    return max(4, int(min(_STEPS, max_bytes // wanted) // len(runs)))


def add_steps(run: ReportData, fields: dict[str, Any], steps: Sequence[int], max_bytes: int) -> None:
    """Add groups and rollouts of steps to what the page shows of a run, in about `max_bytes`."""
    if not steps:
        fields |= {"groups": [], "rollouts": [], "read": {}}
        return
    groups, rollouts, read = steps_of(run, steps, max_bytes=int(max_bytes * (1 - _GROUPS_SHARE)))
    kept = _fitting(groups, int(max_bytes * _GROUPS_SHARE))
    fields |= {"groups": kept, "rollouts": rollouts, "read": {**read, "num_groups": len(groups)}}


def _fitting(rows: Sequence[dict[str, Any]], max_bytes: int) -> list[dict[str, Any]]:
    """Return rows, evenly chosen, that take no more bytes."""
    size = len(as_json(list(rows)))
    every = -(-size // max(1, max_bytes))
    return list(rows[::every]) if every > 1 else list(rows)
