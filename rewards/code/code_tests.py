"""Read the tests of a coding problem from its row: inputs, and what is expected of them.

The PRIME format: {"inputs": [...], "outputs": [...]}, equally many, or LiveCodeBench's list of tests. A program reads
an input from stdin and writes the output to stdout. With "fn_name" (as in APPS) a function is called instead: an input
holds its arguments, as a list or as text with one JSON value a line, an output the value it returns, as a value or as
text: JSON if all texts of the row are JSON, else Python's literals if all are, else the texts themselves.
"""

import ast
import json
import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from coati_rl.data.listed_tests import read_listed_tests
from coati_rl.errors import ConfigError

_MAX_CACHED = 64  # the G responses of a group share their tests
# Numbers with a decimal point or an exponent may differ by this much of the expected one, or absolutely (the format's
# own checker compares with NumPy's allclose, whose defaults these are).
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
_MAX_NUMBER = 1000  # characters; longer ones are equal, or text
_MAX_LENGTH_RATIO = 16  # of a right value's JSON to the expected one's: 1.0000000000000002 for 1, \u00e9 for a letter
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]")
_WORD = re.compile(r"\S+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTest:
    """One run of the program."""

    stdin: bytes  # for a function: its arguments, a JSON list
    expected: Any  # text; for a function: a JSON value


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTests:
    """All runs that a program has to pass."""

    function: str  # "" for programs that read stdin
    tests: tuple[CodeTest, ...]

    def is_passed(self, test: CodeTest, *, output: bytes, returned: bytes) -> bool:
        """Tell whether a run that ended well gave what the test expects."""
        if not self.function:
            return _same_bytes(output, test.expected)
        if len(returned) > _MAX_LENGTH_RATIO * (len(json.dumps(test.expected)) + 64):
            return False  # before it is taken apart: 16 MiB of brackets would take 400 MiB
        try:
            value = json.loads(returned)
        except (ValueError, RecursionError):
            return False
        return same_value(value, test.expected)


@lru_cache(maxsize=_MAX_CACHED)
def parse_tests(ground_truth: str) -> CodeTests:
    """Read the tests of a row.

    Raises: ValueError that says what is wrong with them.
    """
    try:
        return _tests(json.loads(ground_truth))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _tests(tests: Any) -> CodeTests:
    if isinstance(tests, list) and tests:
        try:
            tests = read_listed_tests(tests, "the row")
        except ConfigError as error:
            raise ValueError(str(error)) from error
    if not isinstance(tests, dict):
        raise ValueError('not {"inputs": [...], "outputs": [...]}')
    inputs, outputs, function = tests.get("inputs"), tests.get("outputs"), tests.get("fn_name") or ""
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not isinstance(function, str):
        raise ValueError('not {"inputs": [...], "outputs": [...]}')
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs; they must be equally many, at least one")
    make = _function_test if function else _stdin_test
    pairs = zip(inputs, _values(outputs) if function else outputs, strict=True)
    return CodeTests(function=function, tests=tuple(make(*pair) for pair in pairs))


def _same_bytes(output: bytes, expected: str) -> bool:
    """As `same_output`. What is no UTF-8 is no expected output, and is told from one before it is made text of."""
    if output.strip() == expected.encode(errors="surrogatepass").strip():
        return True
    try:
        return same_output(output.decode(), expected)
    except UnicodeDecodeError:
        return False


def same_output(actual: str, expected: str) -> bool:
    """True when all lines agree, word by word. White space around words and empty lines do not count.

    Output of any size costs no more than reading it up to the first difference.
    """
    if actual.strip() == expected.strip():
        return True
    return all(
        ours is not None and theirs is not None and ours[0] == theirs[0] and _same_word(ours[1], theirs[1])
        for ours, theirs in zip_longest(_words(actual), _words(expected))
    )


def same_value(actual: Any, expected: Any) -> bool:
    """True when two JSON values are equal; decimal numbers nearly so. APPS wraps an expected value in a list of one."""
    if _same_json(actual, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same_json(actual, expected[0])


def _words(text: str) -> Iterator[tuple[bool, str]]:
    """All words, each with whether it is the first of its line."""
    end = -1
    for match in _WORD.finditer(text):
        yield end < 0 or text.find("\n", end, match.start()) >= 0, match[0]
        end = match.end()


def _same_word(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if len(actual) > _MAX_NUMBER or not (_NUMBER.fullmatch(actual) and _NUMBER.fullmatch(expected)):
        return False
    if expected.lstrip("+-").isdigit():
        if actual.lstrip("+-").isdigit() and (_LEADING_ZERO.match(actual) or _LEADING_ZERO.match(expected)):
            return False  # digits that are text: 00101 is not 101
        return Decimal(actual) == Decimal(expected)  # 5.0 is 5, but 1000001 is not 1000002
    return _is_close(float(actual), float(expected))


def _same_json(actual: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(actual, int | float):
        return actual == expected or _is_close(actual, expected)
    if isinstance(expected, list) and isinstance(actual, list):
        return len(actual) == len(expected) and all(map(_same_json, actual, expected))
    if isinstance(expected, dict) and isinstance(actual, dict):
        return actual.keys() == expected.keys() and all(_same_json(actual[key], expected[key]) for key in expected)
    return bool(actual == expected)


def _is_close(actual: float, expected: float) -> bool:
    """False for infinities: a number that no float can hold has become one."""
    try:
        return math.isfinite(expected) and math.isclose(actual, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:  # an integer that no float can hold
        return False


def _stdin_test(given: Any, expected: Any) -> CodeTest:
    """A list of lines is as good as text: APPS has both."""
    return CodeTest(stdin=_as_text(given, "an input").encode(), expected=_as_text(expected, "an output"))


def _as_text(value: Any, what: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type(value).__name__}; write text")
    return value


def _values(outputs: list[Any]) -> list[Any]:
    """Return what a function has to return in each test."""
    for read in (json.loads, _literal):
        with suppress(ValueError, SyntaxError, TypeError):
            return [read(output) if isinstance(output, str) else output for output in outputs]
    return outputs


def _literal(text: str) -> Any:
    """A value as Python writes it, True or ['a', (1, 2)], with what JSON makes of it."""
    return json.loads(json.dumps(ast.literal_eval(text)))


def _function_test(given: Any, expected: Any) -> CodeTest:
    arguments = [json.loads(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
    if not isinstance(arguments, list):
        raise ValueError(f"an input is {type(given).__name__}; write a list of arguments, or one JSON value a line")
    same_value(expected, expected)  # nested as deep as it is, it can be compared
    return CodeTest(stdin=json.dumps(arguments).encode(), expected=expected)
