"""Read a run directory by its records: metrics, syncs, evaluations, rollouts, checkpoints, configuration."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from coati_rl.checkpoint.directory import checkpoints_in
from coati_rl.checkpoint.settings_files import CONFIG, settings_of_step
from coati_rl.errors import ConfigError
from coati_rl.observability.records import MACHINE
from coati_rl.observability.sinks import METRICS, SYNCS
from coati_rl.observability.step_files import steps_in
from coati_rl.run_reader.json_lines import read_json_lines
from coati_rl.run_reader.rollout import RecordedRollout
from coati_rl.run_reader.step_lines import last_step, line_at, lines_of_step, without_tokens
from coati_rl.yaml_text import parse_yaml

ANNOTATIONS = "annotations.jsonl"
_LOCKS = Path("/proc/locks")
_LOG_TAIL_BYTES = 1 << 20
_PROBLEM = re.compile(r"^\S+ \S+ (WARNING|ERROR|CRITICAL) [\w.]+: ")


class LinePlace(NamedTuple):
    """Say where a rollout's line is."""

    path: Path
    start: int  # byte


class RunDirectory:
    """Read one run, which may be running; nothing of what it goes on writing is kept, nothing locked or written."""

    def __init__(self, path: Path, *, skips_damaged: bool = False) -> None:
        """Take the directory. Raises: ConfigError if it is none of a run.

        `skips_damaged`: steps, syncs and evaluations are read without damaged lines, which raise a ConfigError else.
        """
        self.path, self._skips_damaged = path, skips_damaged
        try:
            is_run = (path / CONFIG).is_file()
        except OSError as error:
            raise ConfigError(
                f"{path}: cannot be read: {error.strerror}; give a directory that you may read"
            ) from error
        if not is_run:
            raise ConfigError(f"{path}: has no config.yaml; give the directory of a run")

    def config(self, step: int | None = None) -> dict[str, Any]:
        """Return the resolved configuration of the last start, or that which a step was trained with.

        Raises: ConfigError if the file cannot be read.
        """
        path = self.path / CONFIG if step is None else settings_of_step(step, self.path)
        try:
            found = parse_yaml(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or a date that does not exist
            raise ConfigError(f"{path}: cannot be read: {error}; give the directory of a run") from error
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"{path}: holds no settings; give the directory of a run")
        return found

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of each optimizer step."""
        return [*self.iterate_steps()]

    def iterate_steps(self) -> Iterator[dict[str, Any]]:
        """Yield the metrics of each optimizer step; of a long run they are not to be held all at once."""
        return read_json_lines(self.path / METRICS, skips_damaged=self._skips_damaged)

    def syncs(self) -> list[dict[str, Any]]:
        """Return the weight syncs; a job on a dataset has none."""
        return [*read_json_lines(self.path / SYNCS, skips_damaged=self._skips_damaged)]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the summaries of evaluations."""
        return [*read_json_lines(self.evaluation_summary, skips_damaged=self._skips_damaged)]

    @property
    def evaluation_summary(self) -> Path:
        """Return the file of the summaries of evaluations."""
        return self._output("eval_save_dir", "eval") / "summary.jsonl"

    def checkpoints(self) -> list[Path]:
        """Return the run's checkpoints, the oldest first."""
        return checkpoints_in(self._output("save_dir", "checkpoints"))

    def starts(self) -> list[dict[str, Any]]:
        """Return the machine and the packages of each start of the run, resumptions included."""
        return [*read_json_lines(self.path / MACHINE)]

    def resumptions(self) -> list[dict[str, Any]]:
        """Return when and from which checkpoint the run was resumed in this directory."""
        return [*read_json_lines(self.path / "resumes.jsonl")]

    def annotations(self) -> list[dict[str, Any]]:
        """Return what people have noted of rollouts."""
        return [*read_json_lines(self.path / ANNOTATIONS)]

    def problems(self) -> list[str]:
        """Return the warnings and errors at the end of the driver's log, without times, the last one last."""
        try:
            with (self.path / "logs" / "driver.log").open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").split("\n")
        except OSError:
            return []
        return [line[found.end() :] for line in lines if (found := _PROBLEM.match(line))]

    def rollouts(self, step: int | None = None) -> Iterator[RecordedRollout]:
        """Yield the trajectories in the order of their lines; of one optimizer step, or of all."""
        if step is not None:
            yield from (self._read(LinePlace(path, start), line) for path, start, line in self._lines_of(step))
            return
        for path in self.rollout_files():
            yield from map(RecordedRollout.of, read_json_lines(path))

    def rollouts_without_tokens(self, step: int) -> Iterator[tuple[LinePlace, RecordedRollout]]:
        """Yield the trajectories of a step and where they are; the fields of their tokens are not read."""
        for path, start, line in self._lines_of(step):
            with _named(path, start):
                yield LinePlace(path, start), RecordedRollout.of(without_tokens(line))

    def rollout_at(self, place: LinePlace) -> RecordedRollout:
        """Return the trajectory at a place, all fields of it."""
        return self._read(place, line_at(*place))

    def last_rollout_step(self) -> int | None:
        """Return the last optimizer step that has rollouts."""
        steps = (last_step(path) for path in reversed(self.rollout_files()))
        return next((step for step in steps if step is not None), None)

    def is_running(self) -> bool:
        """Return True if a process of this machine holds the run's lock; it is not touched."""
        lock = self.path / ".lock"
        if not lock.is_file() or not _LOCKS.is_file():
            return False
        inode = str(os.stat(lock).st_ino)
        held = (line.split() for line in _LOCKS.read_text(encoding="ascii").splitlines())
        return any(inode == field.rpartition(":")[2] for fields in held for field in fields if field.count(":") == 2)

    def _output(self, setting: str, default: str) -> Path:
        """Return the directory that the setting names, or the default one."""
        own = self._settings.get(setting)
        return Path(str(own)) if own else self.path / default

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return self.config()

    def _lines_of(self, step: int) -> Iterator[tuple[Path, int, bytes]]:
        return ((path, *each) for path in self.rollout_files(step) for each in lines_of_step(path, step))

    def _read(self, place: LinePlace, line: bytes) -> RecordedRollout:
        with _named(*place):
            return RecordedRollout.of(json.loads(line))

    def rollout_files(self, step: int | None = None) -> list[Path]:
        """Return the files of rollouts, by step; of one step those that may hold it."""
        found = self._output("rollout_save_dir", "rollouts").glob("steps-*.jsonl")
        by_steps = sorted((path, steps) for path in found if (steps := steps_in(path)))
        return [path for path, steps in by_steps if step is None or step in steps]


@contextmanager
def _named(path: Path, start: int) -> Iterator[None]:
    """Name the line in the error of one that cannot be read."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{path}, at byte {start}: the line is not of a run: {error}") from error
