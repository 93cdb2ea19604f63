"""Collect the figures of a run's steps as columns, and thin them for the page: a bucket has mean, least and largest."""

import math
import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from coati_rl.observability.records import evaluation_metrics

SAMPLES, SPEED = "samples", "tokens_per_s"
_DIGITS = 5
_SUMS = ("step_s", "train_s", "rollout_wait_s", "sync_s", "num_response_tokens", "num_prompt_tokens", "num_tokens")


def rounded(value: float | None) -> float | int | None:
    """Return a number with as many digits as a chart can show; None for one that is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(f"{value:.{_DIGITS}g}")


def num_samples(record: Mapping[str, Any], group_size: int) -> int:
    """Return how many samples came in for a step."""
    groups = record.get("groups_total")
    return int(record.get("num_samples") or 0) if groups is None else int(groups) * group_size


def speed(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the tokens of a step for each of its seconds, by its name in charts; empty if it has none."""
    tokens, seconds = record.get("num_response_tokens", record.get("num_tokens")), record.get("step_s")
    return {SPEED: tokens / seconds} if tokens and seconds else {}


class Curves:
    """Hold the columns of a run; a value that is missing is NaN."""

    def __init__(self, group_size: int = 1) -> None:
        """Take the samples of a group, by which those that came in for a step are counted."""
        self._group_size = group_size
        self._columns: dict[str, array[float]] = {}
        self._num_samples = 0
        self.num_steps = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the record of a step."""
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        self._num_samples += num_samples(numbers, self._group_size)
        numbers |= {SAMPLES: self._num_samples} | speed(numbers)
        for key, value in numbers.items():
            column = self._columns.get(key)
            if column is None:
                column = self._columns[key] = array("d", [math.nan]) * self.num_steps
            column.append(value)
        self.num_steps += 1
        for column in self._columns.values():
            if len(column) < self.num_steps:
                column.append(math.nan)

    def column(self, key: str) -> np.ndarray:
        """Return a column as float64[steps]; NaN where there is no value."""
        found = self._columns.get(key)
        return np.full(self.num_steps, np.nan) if found is None else np.asarray(found, dtype=np.float64)

    def figures(self) -> list[str]:
        """Return the figures that have a value in some step."""
        return [key for key in self._columns if np.isfinite(self.column(key)).any()]

    def constants(self) -> dict[str, float | int | None]:
        """Return the figures that have the same value in all steps."""
        spans = {key: self.column(key) for key in self.figures()}
        return {
            key: rounded(float(np.nanmin(each))) for key, each in spans.items() if np.nanmin(each) == np.nanmax(each)
        }

    def sums(self) -> dict[str, float | int | None]:
        """Return the totals of seconds and tokens."""
        return {key: rounded(float(np.nansum(self.column(key)))) for key in _SUMS if key in self._columns}

    def thinned(self, max_points: int) -> dict[str, dict[str, list[Any]]]:
        """Return the columns as JSON, each as {"mean", "min", "max"} of buckets; the latter two only where they differ.

        Steps, samples and times are those of a bucket's last step.
        """
        ends = np.unique(np.linspace(0, self.num_steps, min(max_points, self.num_steps) + 1).astype(int))
        return {key: self._bucketed(key, ends) for key in self.figures()}

    def _bucketed(self, key: str, ends: np.ndarray) -> dict[str, list[Any]]:
        column = self.column(key)
        if key in ("step", SAMPLES, "time_s"):
            return {"mean": [*map(rounded, column[ends[1:] - 1].tolist())]}
        parts = [column[start:end] for start, end in pairwise(ends.tolist())]
        functions: dict[str, Callable[[np.ndarray], Any]] = {"mean": np.nanmean, "min": np.nanmin, "max": np.nanmax}
        if len(parts) == self.num_steps:
            del functions["min"], functions["max"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a bucket without a value
            return {name: [rounded(float(each(part))) for part in parts] for name, each in functions.items()}


def evaluation_points(summaries: Iterable[Mapping[str, Any]]) -> dict[str, list[tuple[int, float | int | None]]]:
    """Return steps and values of the figures of evaluations, by their names in charts."""
    points: dict[str, list[tuple[int, float | int | None]]] = {}
    for summary in summaries:
        for name, value in evaluation_metrics(summary).items():
            points.setdefault(name, []).append((summary["step"], rounded(value)))
    return {name: sorted(values) for name, values in points.items()}
