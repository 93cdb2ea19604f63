"""The input of `score`: a stream of JSON lines flows in, checked as a whole, then one problem per line flows out."""

import json
import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from coati_rl.errors import ConfigError
from coati_rl.types import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A line of the input."""

    response: str
    problem: Problem
    num_bytes: int  # of the line


class CheckedRows:
    """All lines are checked when this is made, so that nothing is scored if one is bad; then they can be read once.

    They are never in memory together: a file is read twice, and what cannot be (a pipe) is kept in a temporary file.

    Raises: ConfigError with the number of the first bad line.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._kept: BinaryIO | None = None
        if stream.seekable():
            start = stream.tell()
            self.num_rows = sum(1 for _ in _rows(stream))
            stream.seek(start, os.SEEK_SET)
            self._source = stream
        else:
            self._kept = self._source = tempfile.TemporaryFile()  # noqa: SIM115 - close() is ours
            self.num_rows = sum(1 for _ in _rows(_copied(stream, self._kept)))
            self._kept.seek(0)

    def __iter__(self) -> Iterator[Row]:
        return _rows(self._source)

    def close(self) -> None:
        """Remove the temporary file."""
        if self._kept is not None:
            self._kept.close()


def _copied(lines: BinaryIO, copy: BinaryIO) -> Iterator[bytes]:
    for line in lines:
        copy.write(line)
        yield line


def _rows(lines: BinaryIO | Iterator[bytes]) -> Iterator[Row]:
    return (parse_row(line, number) for number, line in enumerate(lines, start=1))


def parse_row(line: bytes, number: int) -> Row:
    """The row of a line: {"response": str} with "gt_answer" or "test_cases", and maybe "messages" and "prompt".

    Raises: ConfigError with the line's number and what is wrong with it.
    """
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"line {number} is not JSON: {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("response"), str):
        raise ConfigError(f'line {number} has no "response" (text)')
    problem = Problem(
        ground_truth=_ground_truth(row, number),
        uid=f"line {number}",
        messages=_messages(row, number),
        prompt=_prompt(row, number),
    )
    return Row(response=row["response"], problem=problem, num_bytes=len(line))


def _ground_truth(row: dict[str, Any], number: int) -> str:
    answer, test_cases = row.get("gt_answer"), row.get("test_cases")
    if answer is not None and test_cases is not None:
        raise ConfigError(f'line {number} has "gt_answer" and "test_cases"; keep the one that your reward checks')
    if test_cases is not None:
        return _tests(test_cases, number)
    is_finite_number = isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer)
    if not isinstance(answer, str) and not is_finite_number:
        raise ConfigError(f'line {number} has no "gt_answer" (text or a finite number) and no "test_cases"')
    return str(answer)


def _tests(test_cases: Any, number: int) -> str:
    has_lists = isinstance(test_cases, dict) and all(
        isinstance(test_cases.get(key), list) for key in ("inputs", "outputs")
    )
    if not has_lists:
        raise ConfigError(f'line {number}: "test_cases" must be {{"inputs": [...], "outputs": [...]}}')
    if not test_cases["inputs"] or len(test_cases["inputs"]) != len(test_cases["outputs"]):
        raise ConfigError(f'line {number}: "test_cases" needs as many "outputs" as "inputs", and at least one')
    return json.dumps(test_cases)


def _messages(row: dict[str, Any], number: int) -> tuple[dict[str, Any], ...]:
    messages = row.get("messages") or []
    if isinstance(messages, dict):
        messages = [messages]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f'line {number}: "messages" must be [{{"role": ..., "content": ...}}, ...]')
    return tuple(messages)


def _prompt(row: dict[str, Any], number: int) -> str:
    prompt = row.get("prompt") or ""
    if not isinstance(prompt, str):
        raise ConfigError(f'line {number}: "prompt" must be text')
    return prompt
