"""Read the rows of JSONL files by their place, so that only places are kept in memory.

A first pass over the files checks every row and keeps its place: 16 bytes. A file that changes afterwards is an error.
"""

import json
import os
from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from coati_rl.errors import ConfigError, RunError
from coati_rl.reading.files import files_of, row_of_line
from coati_rl.reading.lazy import LazySequence
from coati_rl.reading.lines import line_at, lines_of

Row = TypeVar("Row", covariant=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    path: Path
    name: str  # as it was given, for messages
    size: int
    mtime_ns: int


class StreamedRows(LazySequence[Row]):
    """Hold the places of rows; an item is read when it is asked for.

    Args:
        source: a JSONL file, or a directory of them.
        flag: the command-line flag it came from, for messages.
        read: makes the item of a row and where it is; raises ConfigError for a row that is wrong.
        kind_of: of an item; `kinds` are those of all rows.
        max_rows: keep no more than the first of them; None: all.
    Raises: ConfigError as `files.read_rows`.
    """

    def __init__(
        self,
        source: str,
        *,
        flag: str,
        read: Callable[[str, Any], Row],
        kind_of: Callable[[Row], Hashable] = type,
        max_rows: int | None = None,
    ) -> None:
        self._flag, self._read = flag, read
        self.kinds = set[Any]()
        self._files = [_described(path, source, flag) for path in _jsonl_files(source, flag)]
        self._handles: dict[int, BinaryIO] = {}
        self._file_numbers, self._offsets, self._lines = array("I"), array("Q"), array("I")
        for number in range(len(self._files)):
            for offset, line, row in self._scan(number):
                if max_rows is not None and len(self) >= max_rows:
                    break
                self.kinds.add(kind_of(read(self._where(number, line), row)))
                self._file_numbers.append(number)
                self._offsets.append(offset)
                self._lines.append(line)
        if not self._offsets:
            raise ConfigError(f"{flag} {source}: holds no rows")

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._offsets)

    def item(self, number: int) -> Row:
        """Read a row. Raises: RunError for a file that has changed since the first pass."""
        offset, line, number = self._offsets[number], self._lines[number], self._file_numbers[number]
        where, file = self._where(number, line), self._files[number]
        try:
            handle = self._opened(number)
            now = os.fstat(handle.fileno())
            if (now.st_size, now.st_mtime_ns) != (file.size, file.mtime_ns):
                raise RunError(f"{where}: the file has changed since the run began; leave it as it was, or begin again")
            row = json.loads(line_at(handle, offset))
        except (OSError, ValueError) as error:
            raise RunError(f"{where}: cannot be read any more: {error}") from error
        return self._read(where, row)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without open files."""
        return {**self.__dict__, "_handles": {}}

    def _opened(self, number: int) -> BinaryIO:
        if number not in self._handles:
            for handle in self._handles.values():
                handle.close()
            self._handles = {number: self._files[number].path.open("rb")}
        return self._handles[number]

    def _where(self, number: int, line: int) -> str:
        return f"{self._flag} {self._files[number].name}, line {line}"

    def _scan(self, number: int) -> Iterator[tuple[int, int, Any]]:
        """Yield offset, line and row of each line that is not blank."""
        try:
            with self._files[number].path.open("rb") as file:
                for line, (offset, text) in enumerate(lines_of(file), 1):
                    if text.strip():
                        yield offset, line, row_of_line(text, self._where(number, line))
        except OSError as error:
            name = self._files[number].name
            raise ConfigError(f"{self._flag} {name}: cannot be read: {error.strerror or error}") from error


def _jsonl_files(source: str, flag: str) -> list[Path]:
    path = Path(source).expanduser()
    files = files_of(path, source, flag) if path.is_dir() else [path]
    for file in files:
        if file.suffix.lower() != ".jsonl" or not file.is_file():
            what = "no JSONL file" if file.is_file() else "no such file"
            raise ConfigError(
                f"{flag} {file}: {what}; --streaming reads JSONL files and directories of them: write JSONL, or leave "
                "--streaming out"
            )
    return files


def _described(path: Path, source: str, flag: str) -> _File:
    try:
        stat = path.stat()
    except OSError as error:
        raise ConfigError(f"{flag} {source}: cannot be read: {error.strerror or error}") from error
    return _File(path=path.resolve(), name=str(path), size=stat.st_size, mtime_ns=stat.st_mtime_ns)
