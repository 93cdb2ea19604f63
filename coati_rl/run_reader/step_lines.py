"""Find the lines of an optimizer step in a rollout file by bisection: steps ascend in it, and it may be gigabytes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_STEP = re.compile(rb'\{"step": (\d+),')  # how the recorder begins a line
_HEAD_BYTES = 64
_SCANNED_BYTES = 1 << 16  # what is left of a bisection is read line by line
_TAIL_BYTES = 1 << 20
_TOKENS = b', "prompt_token_ids": '  # of a line's fields the first one of its tokens; no text can hold it unescaped


def lines_of_step(path: Path, step: int) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a step, each with the byte at which it begins; a last line that is cut off is left out."""
    with path.open("rb") as file:
        file.seek(_last_before(file, step))
        place = file.tell()
        for line in file:
            number = _step_of(line)
            if number is None or number > step or not line.endswith(b"\n"):
                return
            if number == step:
                yield place, line
            place += len(line)


def line_at(path: Path, place: int) -> bytes:
    """Return the line that begins at a byte."""
    with path.open("rb") as file:
        file.seek(place)
        return file.readline()


def last_step(path: Path) -> int | None:
    """Return the step of a file's last whole line; None if it has none."""
    with path.open("rb") as file:
        end = file.seek(0, 2)
        tail = b""
        while end:
            start = max(0, end - _TAIL_BYTES)
            file.seek(start)
            tail = file.read(end - start) + tail
            lines = tail.split(b"\n")[:-1]
            for line in reversed(lines if start == 0 else lines[1:]):
                return _step_of(line)
            end = start
    return None


def without_tokens(line: bytes) -> dict[str, Any]:
    """Return a line's fields but for those of its tokens, which are most of its bytes; of a line without them all."""
    head, found, _ = line.partition(_TOKENS)
    try:
        record: dict[str, Any] = json.loads(head + b"}" if found else line)
    except ValueError:  # an environment noted something under this name
        record = json.loads(line)
    return record


def _last_before(file: BinaryIO, step: int) -> int:
    """Return where a line begins, at or before the first one of a step, and near it."""
    low, high = 0, file.seek(0, 2)
    while high - low > _SCANNED_BYTES:
        middle = (low + high) // 2
        _to_next_line(file, middle)
        number = _step_of(file.readline(_HEAD_BYTES))
        if number is None or number >= step:
            high = middle
        else:
            low = middle
    return _to_next_line(file, low)


def _to_next_line(file: BinaryIO, place: int) -> int:
    """Seek the first line that begins at a byte or behind it. Returns: where it begins."""
    if place == 0:
        return file.seek(0)
    file.seek(place - 1)
    file.readline()
    return file.tell()


def _step_of(line: bytes) -> int | None:
    """Return the step that a line begins with; None if it has none, or is cut off."""
    if found := _STEP.match(line):
        return int(found[1])
    try:
        record = json.loads(line)
    except ValueError:
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None
