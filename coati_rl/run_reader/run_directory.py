"""Read a run directory by its records: metrics, syncs, evaluations, rollouts, checkpoints, configuration."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from coati_rl.checkpoint.directory import checkpoints_in
from coati_rl.errors import ConfigError
from coati_rl.observability.sinks import METRICS
from coati_rl.run_reader.json_lines import read_json_lines
from coati_rl.run_reader.rollout import Rollout

_ROLLOUTS = re.compile(r"steps-(\d+)-(\d+)\.jsonl")
_LOCKS = Path("/proc/locks")


class RunDirectory:
    """Read one run, which may be running; nothing is cached, locked or written."""

    def __init__(self, path: Path) -> None:
        """Take the directory. Raises: ConfigError if it is none of a run."""
        self.path = path
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path}: has no config.yaml; give the directory of a run")

    def config(self) -> dict[str, Any]:
        """Return the resolved configuration, by section. Raises: ConfigError if the file cannot be read."""
        try:
            found = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ConfigError(f"{self.path / 'config.yaml'}: cannot be read: {error}") from error
        return dict(found or {})

    def steps(self) -> list[dict[str, Any]]:
        """Return the metrics of each optimizer step."""
        return [*read_json_lines(self.path / METRICS)]

    def syncs(self) -> list[dict[str, Any]]:
        """Return the weight syncs; a job on a dataset has none."""
        return [*read_json_lines(self.path / "syncs.jsonl")]

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the summaries of evaluations."""
        return [*read_json_lines(self.path / "eval" / "summary.jsonl")]

    def checkpoints(self) -> list[Path]:
        """Return the checkpoints in the directory, the oldest first."""
        return checkpoints_in(self.path / "checkpoints")

    def rollouts(self, step: int | None = None) -> Iterator[Rollout]:
        """Yield the trajectories in the order of their lines; of one optimizer step, or of all."""
        for path in self.rollout_files():
            first, last = map(int, _matched(path))
            if step is None or first <= step <= last:
                for line in read_json_lines(path):
                    if step in (None, line.get("step")):
                        yield Rollout.of(line)

    def is_running(self) -> bool:
        """Return True if a process of this machine holds the run's lock; it is not touched."""
        lock = self.path / ".lock"
        if not lock.is_file() or not _LOCKS.is_file():
            return False
        inode = str(os.stat(lock).st_ino)
        held = (line.split() for line in _LOCKS.read_text(encoding="ascii").splitlines())
        return any(inode == field.rpartition(":")[2] for fields in held for field in fields if field.count(":") == 2)

    def rollout_files(self, directory: Path | None = None) -> list[Path]:
        """Return the files of rollouts, the first steps first; `directory`: of --rollout-save-dir."""
        found = (directory or self.path / "rollouts").glob("steps-*.jsonl")
        return sorted(path for path in found if _ROLLOUTS.fullmatch(path.name))


def _matched(path: Path) -> tuple[str, ...]:
    found = _ROLLOUTS.fullmatch(path.name)
    assert found is not None  # noqa: S101, chosen by it
    return found.groups()
