"""Sum a run up at its end: the first, the best and the last value of its main figures, and the minutes of each phase.

Input: the events of steps and evaluations, in order. Output: lines for a terminal and the log. Jobs with producers show
rewards and accuracies, jobs on a dataset losses.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coati_rl.observability.records import evaluation_metrics
from coati_rl.text import count

MAX_LINES = 10

_HEADINGS = ("first", "best", "of step", "last")
_SMALLEST = ("loss", "perplexity", "kl", "kl_mean")  # figures whose best value is the smallest, by their last words
# Of a step's record, and what it is called; of a job without producers the losses and what is like an accuracy.
_OF_ROLLOUTS = {"reward_mean": "reward", "answer_accuracy": "accuracy", "teacher_kl_mean": "teacher KL"}
_OF_DATASETS = {"loss": "loss", "rewards/accuracies": "accuracy", "step_accuracy": "step accuracy"}
_OF_EVALUATIONS = ("accuracy", "reward_mean", "loss", "rewards/accuracies", "step_accuracy")
_PHASES = (("rollout_wait_s", "waiting for work"), ("train_s", "training"), ("sync_s", "weight syncs"))


class RunSummary:
    """Collect what the end of a run tells; `now` is a monotonic clock, in seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begin = now()
        self._first_at: float | None = None  # of work
        self._values: dict[str, list[tuple[int, float]]] = {}  # by name: steps and values
        self._seconds = {name: 0.0 for _, name in _PHASES}
        self.last_step: int | None = None

    @property
    def has_figures(self) -> bool:
        """Return True once there is something to tell."""
        return bool(self._values)

    @property
    def curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return the steps and values of each figure by its name; rewards of 1 and 0 are shown as accuracies alone."""
        return {name: values for name, values in self._values.items() if not self._is_accuracy(name)}

    def begin_work(self) -> None:
        """Note that the run has started up; the first call counts."""
        self._first_at = self._now() if self._first_at is None else self._first_at

    def add(self, event: Mapping[str, Any]) -> None:
        """Take an event of a step or an evaluation."""
        self.begin_work()
        self.recall(event)
        if event["event"] == "step":
            self.last_step = event["step"]
            for key, name in _PHASES:
                self._seconds[name] += event.get(key) or 0.0

    def recall(self, event: Mapping[str, Any]) -> None:
        """Take the figures of an event from before the run was resumed, but not its time."""
        if event["event"] == "step":
            names = _OF_ROLLOUTS if "reward_mean" in event else _OF_DATASETS
            self._note(event["step"], {name: event.get(key) for key, name in names.items()})
        elif event["event"] == "evaluation":
            figures = evaluation_metrics({**event, **event.get("metrics", {})})
            of_set = f"eval/{event['task']}/"
            kept = {name: figures[name] for key in _OF_EVALUATIONS if (name := of_set + key) in figures}
            self._note(event["step"], kept)

    def rows(self) -> list[tuple[str, ...]]:
        """Return a row for each figure: its name, the first value, the best one with its step, the last one."""
        rows: list[tuple[str, ...]] = []
        for name, values in self.curves.items():
            sign = -1 if name.replace("/", " ").replace("KL", "kl").split()[-1] in _SMALLEST else 1
            step, best = max(values, key=lambda each: (sign * each[1], -each[0]))
            first, last = values[0][1], values[-1][1]
            rows.append((name, f"{first:.4g}", f"{best:.4g}", str(step), f"{last:.4g}"))
        return rows

    def minutes(self) -> str:
        """Return one line with the time of each phase; what is not of a named phase is other."""
        whole = self._now() - self._begin
        starting = whole if self._first_at is None else self._first_at - self._begin
        phases = {"starting": starting, **{name: seconds for name, seconds in self._seconds.items() if seconds}}
        phases["other"] = max(0.0, whole - sum(phases.values()))
        parts = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in phases.items())
        return f"minutes: {whole / 60:.1f} in all; {parts}"

    def lines(self, closing: Sequence[str] = ()) -> list[str]:
        """Return at most MAX_LINES lines: a table of aligned columns, the minutes, and `closing`.

        Where the table has more rows than there is room for, evaluations beyond those are left out.
        """
        shown = self._chosen(MAX_LINES - 2 - len(closing))
        rows: Sequence[tuple[str, ...]] = [(self._steps(), *_HEADINGS), *shown]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        table = [
            "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])])  # numbers end below each other
            for row in rows
        ]
        return [*table, self.minutes(), *closing]

    def _steps(self) -> str:
        return "" if self.last_step is None else count(self.last_step, "step")

    def _chosen(self, number: int) -> list[tuple[str, ...]]:
        """Return at most `number` rows, in order."""
        rows = self.rows()
        sets = [row for row in rows if row[0].startswith("eval/")]
        left_out = sets[max(number - (len(rows) - len(sets)), 0) :]
        return [row for row in rows if row not in left_out][:number]

    def _is_accuracy(self, name: str) -> bool:
        """Return True for an evaluation's mean reward that is its accuracy, as of rewards 1 and 0."""
        stem = name.removesuffix("/reward_mean")
        return stem != name and self._values[name] == self._values.get(f"{stem}/accuracy")

    def _note(self, step: int, figures: Mapping[str, float | None]) -> None:
        for name, value in figures.items():
            if value is not None:
                self._values.setdefault(name, []).append((step, value))
