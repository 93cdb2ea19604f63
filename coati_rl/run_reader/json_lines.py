"""Read JSON Lines that another process may still be writing."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError

_TAIL_BYTES = 1 << 16


class StalePositionError(Exception):
    """Report that a position is in a file that has been written anew since."""


def read_json_lines(path: Path, *, skips_damaged: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file's lines; none of a file that is missing.

    Lines end at line feeds alone: a text may hold other line ends. The last line is left out if it is cut off, as a
    killed run leaves it, or one that is writing.

    Args:
        path: of the file.
        skips_damaged: leave out each line that is no object: a run that was killed while it wrote, and went on, has one
            in the middle of a file.
    Raises: ConfigError naming such a line.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        yield from _objects(file, path, skips_damaged=skips_damaged)


def first_lines(path: Path, *, max_lines: int, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the objects at a file's beginning; lines that are damaged, or cut at `max_bytes`, are left out."""
    with path.open("rb") as file:
        lines = file.read(max_bytes).split(b"\n")
    yield from _objects(lines[:max_lines], path, skips_damaged=True)


def last_lines(path: Path, *, max_lines: int, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the objects at a file's end; lines that are damaged, or cut at `max_bytes`, are left out."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - max_bytes))
        lines = file.read(max_bytes).split(b"\n")
    yield from _objects(lines[-max_lines:], path, skips_damaged=True)


def _objects(lines: Iterable[bytes], path: Path, *, skips_damaged: bool) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("it is not an object")
        except ValueError as error:
            if skips_damaged:
                continue
            if not line.endswith(b"\n"):
                return
            raise ConfigError(f"{path}:{number}: the line is not of a run: {error}") from error
        yield record


def read_new_lines(path: Path, position: str = "") -> tuple[list[dict[str, Any]], str]:
    """Return the objects of the whole lines behind a position, and the position behind them.

    Args:
        path: of a file to which lines are appended.
        position: as this function has returned it; empty: the beginning.
    Raises: StalePositionError if the file is another one by now, as after a resume, which takes lines back;
        ConfigError if a line is no JSON.
    """
    inode, offset = map(int, position.split("-")) if re.fullmatch(r"\d{1,20}-\d{1,20}", position) else (0, 0)
    try:
        found = path.stat()
    except FileNotFoundError:
        if inode:
            raise StalePositionError(f"{path} is not there any more") from None
        return [], ""
    if inode not in (0, found.st_ino) or offset > found.st_size:
        raise StalePositionError(f"{path} was written anew")
    if offset == found.st_size:
        return [], f"{found.st_ino}-{offset}"
    with path.open("rb") as file:
        file.seek(offset)
        whole = file.read().rpartition(b"\n")[0]
    lines = whole.split(b"\n") if whole else []
    try:
        records = [record for line in lines if isinstance(record := json.loads(line), dict)]
    except ValueError as error:
        raise ConfigError(f"{path}, behind byte {offset}: a line is not of a run: {error}") from error
    return records, f"{found.st_ino}-{offset + len(whole) + bool(whole)}"


def end_of_lines(path: Path) -> str:
    """Return the position behind the last whole line, as `read_new_lines` takes it; empty if there is no file."""
    try:
        with path.open("rb") as file:
            inode, end = os.fstat(file.fileno()).st_ino, file.seek(0, os.SEEK_END)
            while end:
                start = max(0, end - _TAIL_BYTES)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    return f"{inode}-{start + found + 1}"
                end = start
            return f"{inode}-0"
    except FileNotFoundError:
        return ""
