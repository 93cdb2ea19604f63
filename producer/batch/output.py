"""Write the rows of batch inference so that an interrupted command can go on, and none is written twice or lost.

    FILE            rows, in the order of the prompts
    FILE.progress   JSON lines: the settings that decide the rows, then one object for each finished prompt, with the
                    size of FILE after its rows

Rows are written before their prompt's line of progress. What a killed command left after the last such line is cut off
when the command is run again.
"""

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

from coati_rl.disk import disk_errors
from coati_rl.errors import ConfigError

_FORMAT = 1


class BatchOutput:
    """Append the rows of one prompt after the other; a context manager."""

    def __init__(self, path: Path, settings: Mapping[str, Any], *, overwrite: bool = False) -> None:
        """Read what an earlier command has finished; nothing is written before `__enter__`.

        Args:
            path: of the rows.
            settings: as JSON; a command with other ones does not go on.
            overwrite: begin anew.
        Raises: ConfigError if there are rows of another command, or its progress cannot be read.
        """
        self._path = path
        self._progress_path = _progress_path(path)
        self._header: dict[str, Any] = {"format": _FORMAT, "settings": dict(settings)}
        self.records: list[dict[str, Any]] = []  # of the finished prompts, in order
        self._progress_size = 0  # bytes of whole lines
        self._files: list[IO[bytes]] = []
        if not overwrite and (path.exists() or self._progress_path.exists()):
            self._read_progress()

    def __enter__(self) -> Self:
        """Open both files and cut off what belongs to no finished prompt.

        Raises: ConfigError if another process writes them; RunError if they cannot be written.
        """
        with disk_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._progress = self._open(self._progress_path)
            try:
                fcntl.flock(self._progress, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(f"--output {self._path}: another process writes this file; end it first") from error
            self._rows = self._open(self._path)
            self._rows.truncate(self.records[-1]["end"] if self.records else 0)
            self._progress.truncate(self._progress_size)
            if not self._progress_size:
                self._append(self._progress, [self._header])
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            with suppress(OSError):  # of what could not be written before, which `add` has reported
                file.close()

    def add(self, record: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the rows of the next prompt, then its record. Raises: RunError if they cannot be written."""
        with disk_errors(self._path):
            end = self._append(self._rows, rows)
            self.records.append({**record, "num_rows": len(rows), "end": end})
            self._append(self._progress, self.records[-1:])

    def _open(self, path: Path) -> IO[bytes]:
        file = path.open("ab")
        self._files.append(file)
        return file

    def _append(self, file: IO[bytes], lines: Sequence[Mapping[str, Any]]) -> int:
        """Append objects as lines. Returns: the file's size."""
        # Half of a surrogate pair, as a reward's detail may hold, becomes its JSON escape.
        texts = (json.dumps(line, ensure_ascii=False).encode(errors="backslashreplace") for line in lines)
        file.write(b"".join(text + b"\n" for text in texts))
        file.flush()
        return os.fstat(file.fileno()).st_size

    def _read_progress(self) -> None:
        remedy = "give another -o, or --overwrite to replace it"
        if not self._progress_path.is_file():
            raise ConfigError(f"--output {self._path}: exists, and there is no {self._progress_path.name}; {remedy}")
        whole = [line for line in self._progress_path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        try:
            header, *records = [json.loads(line) for line in whole] or [self._header]
            written_by, ends = header["settings"], [0, *(int(record["end"]) for record in records)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--output {self._path}: {self._progress_path.name} cannot be read; {remedy}") from error
        if changed := _changed(written_by, self._header["settings"]):
            raise ConfigError(f"--output {self._path}: was written with {changed}; {remedy}")
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < ends[-1]:
            raise ConfigError(f"--output {self._path}: has {size} bytes where {ends[-1]} were written; {remedy}")
        self.records, self._progress_size = records, sum(map(len, whole))


def earlier_settings(path: Path) -> dict[str, Any]:
    """Return the settings of the command that began a file of rows; empty if they cannot be read."""
    try:
        with _progress_path(path.expanduser().absolute()).open(encoding="utf-8") as file:
            return dict(json.loads(file.readline())["settings"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # `BatchOutput` says what is wrong


def _progress_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.progress")


def _changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ, "temperature 0.7, not 1.0"; empty if none does."""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return ", ".join(f"{name} {before.get(name)}, not {now.get(name)}" for name in names)
