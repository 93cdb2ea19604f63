"""Read from a run's directory what the rules look at, a bounded part of large files.

Damaged lines are left out: a run that was killed while it wrote, and went on, has one in the middle of a file.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

from coati_rl.doctor.driver_log import NO_LOG, DriverLog, read_driver_log
from coati_rl.doctor.source_files import UNKNOWN, SourceFiles, read_source_files
from coati_rl.doctor.spans import EndedSpan, read_spans
from coati_rl.errors import ConfigError
from coati_rl.run_reader.json_lines import first_lines, last_lines
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.run_reader.run_directory import RunDirectory

EXCERPT_BYTES = 8 * 2**20  # of rollouts at the beginning, and as many at the end
EXCERPT_LINES = 1024  # likewise
MAX_STEPS = 100_000  # records of metrics.jsonl that are read, the first ones
Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Hold what was read of a run.

    A quantity "early" is the mean over the first steps that have it, "late" over the last: a tenth of them, at least
    two, at most ten.
    """

    config: Record  # flat, by the names of flags
    steps: Sequence[Record]  # of metrics.jsonl, those without a number left out
    syncs: Sequence[Record] = ()
    evaluations: Sequence[Record] = ()
    first_rollouts: Sequence[RecordedRollout] = ()  # an excerpt, from the first step on
    last_rollouts: Sequence[RecordedRollout] = ()  # an excerpt, of the last steps
    spans: Sequence[EndedSpan] = ()
    log: DriverLog = NO_LOG
    sources: SourceFiles = UNKNOWN
    is_running: bool = False

    @property
    def is_rl(self) -> bool:
        """Return True if the run has producers."""
        return "num_inferencer" in self.config

    def values(self, key: str) -> list[tuple[int, float]]:
        """Return a metric's steps and finite values."""
        return [(each["step"], float(each[key])) for each in self.steps if _is_finite(each.get(key))]

    def early(self, key: str) -> float | None:
        """Return a metric's mean over the first steps; None without one."""
        values = [value for _, value in self.values(key)]
        return mean(values[: _window(len(values))]) if values else None

    def late(self, key: str) -> float | None:
        """Return a metric's mean over the last steps; None with fewer than four."""
        values = [value for _, value in self.values(key)]
        return mean(values[-_window(len(values)) :]) if len(values) > 3 else None

    @property
    def num_steps(self) -> int:
        """Return the number of steps that were recorded."""
        return len(self.steps)

    @cached_property
    def surprisals(self) -> list[tuple[float, int]]:
        """Return of each rollout in the first excerpt the sum of -log p, by the engine, and the number of tokens."""
        lists = ([n for n in each.line.get("rollout_logprobs") or () if n is not None] for each in self.first_rollouts)
        return [(-sum(numbers), len(numbers)) for numbers in lists if numbers]

    @cached_property
    def group_size(self) -> int:
        """Return the samples of a prompt."""
        return int(self.config.get("num_generations") or 1)


def read_run(directory: Path) -> RunData:
    """Read a run. Raises: ConfigError if the directory is none of a run."""
    run = RunDirectory(directory, skips_damaged=True)
    config = run.config()
    files = run.rollout_files()
    steps = [each for each in islice(run.iterate_steps(), MAX_STEPS) if _is_finite(each.get("step"))]
    part = {"max_lines": EXCERPT_LINES, "max_bytes": EXCERPT_BYTES}
    return RunData(
        config=config,
        steps=steps,
        syncs=run.syncs(),
        evaluations=run.evaluations(),
        first_rollouts=_rollouts(first_lines(files[0], **part) if files else ()),
        last_rollouts=_rollouts(last_lines(files[-1], **part) if files else ()),
        spans=read_spans(directory / "timeline"),
        log=read_driver_log(directory / "logs" / "driver.log"),
        sources=read_source_files(config),
        is_running=run.is_running(),
    )


def reward_change(run: RunData) -> str:
    """Return how the mean reward has changed, to be appended to evidence."""
    early, late = run.early("reward_mean"), run.late("reward_mean")
    return "" if early is None or late is None else f"; the mean reward went from {early:.3g} to {late:.3g}"


def reward_error(run: RunData) -> float | None:
    """Return the standard error of a step's mean reward over its prompts, of the first steps; None if not recorded."""
    deviation, prompts = run.early("reward_std"), run.early("groups_total")
    return deviation / prompts**0.5 if deviation and prompts else None


def _rollouts(lines: Any) -> tuple[RecordedRollout, ...]:
    found = []
    for line in lines:
        try:
            found.append(RecordedRollout.of(line))
        except (ConfigError, TypeError):  # of another version, or damaged
            continue
    return tuple(found)


def _window(number: int) -> int:
    return max(2, min(10, number // 10))


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
