"""Read the tests of a coding problem from its row, and compare outputs and values with the expected ones.

Formats are PRIME's, {"inputs": [...], "outputs": [...]} with equally many of both, and LiveCodeBench's list of tests. A
program reads an input from stdin and writes the output to stdout. With "fn_name" (as in APPS) a function is called
instead: an input holds its arguments, as a list or as text with one JSON value per line, an output the return value, as
a value or as text: JSON if all texts of the row are JSON, else Python literals if all are, else the texts themselves.
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

from coati_rl.errors import ConfigError
from coati_rl.reading.listed_tests import read_listed_tests
from rewards.code.long_integers import any_number_of_digits, dump_json, load_json

_MAX_CACHED = 64  # the G responses of a group share their tests
# Relative and absolute tolerances of numbers with a decimal point or an exponent: the defaults of NumPy's allclose,
# which the format's own checker uses.
_RELATIVE, _ABSOLUTE = 1e-5, 1e-8
_MAX_NUMBER = 1000  # characters; longer ones are compared as text
_MAX_LENGTH_RATIO = 16  # of a correct value's JSON to the expected one's: 1.0000000000000002 for 1, \u00e9 for a letter
_LEADING_ZERO = re.compile(r"[+-]?0[0-9]")
_WORD = re.compile(r"\S+")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?", re.ASCII)


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTest:
    """Describe one run of the program."""

    stdin: bytes  # for a function: its arguments, a JSON list
    expected: Any  # text; for a function: a JSON value


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeTests:
    """Hold all tests that a program has to pass."""

    function: str  # "" for programs that read stdin
    tests: tuple[CodeTest, ...]

    def is_passed(self, test: CodeTest, *, output: bytes, returned: bytes) -> bool:
        """Return True if a run that ended without error gave the expected output or value."""
        if not self.function:
            return _same_bytes(output, test.expected)
        if len(returned) > _MAX_LENGTH_RATIO * (len(json.dumps(test.expected, default=str)) + 64):
            return False  # checked before parsing: 16 MiB of brackets would take 400 MiB
        try:
            value = load_json(returned)
        except (ValueError, RecursionError):
            return False
        return same_value(value, test.expected)


@lru_cache(maxsize=_MAX_CACHED)
def parse_tests(ground_truth: str) -> CodeTests:
    """Read the tests of a row.

    Raises: ValueError with the problem.
    """
    try:
        return _tests(load_json(ground_truth))
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
        raise ValueError(f"{len(inputs)} inputs and {len(outputs)} outputs; give equally many, at least one of each")
    make = _function_test if function else _stdin_test
    pairs = zip(inputs, _values(outputs) if function else outputs, strict=True)
    return CodeTests(function=function, tests=tuple(make(*pair) for pair in pairs))


def _same_bytes(output: bytes, expected: str) -> bool:
    """Compare as `same_output`; output that is not UTF-8 differs from any expected output."""
    if output.strip() == expected.encode(errors="surrogatepass").strip():
        return True
    try:
        return same_output(output.decode(), expected)
    except UnicodeDecodeError:
        return False


def same_output(actual: str, expected: str) -> bool:
    """Return True if all lines are equal word by word, ignoring white space around words and empty lines.

    Output is only read up to the first difference.
    """
    if actual.strip() == expected.strip():
        return True
    return all(
        ours is not None and theirs is not None and ours[0] == theirs[0] and _same_word(ours[1], theirs[1])
        for ours, theirs in zip_longest(_words(actual), _words(expected))
    )


def same_value(actual: Any, expected: Any) -> bool:
    """Return True if two JSON values are equal, decimals within tolerance; APPS wraps expected values in a list."""
    if _same_json(actual, expected):
        return True
    return isinstance(expected, list) and len(expected) == 1 and _same_json(actual, expected[0])


def _words(text: str) -> Iterator[tuple[bool, str]]:
    """Yield all words, each with whether it is the first of its line."""
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
            return False  # with leading zeros digits are text: 00101 is not 101
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
    """Return True if two numbers are equal within tolerance; False for infinity, which an overflow gives."""
    try:
        return math.isfinite(expected) and math.isclose(actual, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    except OverflowError:  # an integer that no float can hold
        return False


def _stdin_test(given: Any, expected: Any) -> CodeTest:
    """Make a test of stdin and stdout from text or a list of lines; APPS has both."""
    return CodeTest(stdin=_as_text(given, "an input").encode(), expected=_as_text(expected, "an output"))


def _as_text(value: Any, what: str) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{what} is {type(value).__name__}; write text")
    return value


def _values(outputs: list[Any]) -> list[Any]:
    """Return the expected return value of each test."""
    for read in (load_json, _literal):
        with suppress(ValueError, SyntaxError, TypeError):
            return [read(output) if isinstance(output, str) else output for output in outputs]
    return outputs


def _literal(text: str) -> Any:
    """Read a Python literal, such as True or ['a', (1, 2)], and convert it to JSON types."""
    with any_number_of_digits():
        value = json.dumps(ast.literal_eval(text))
    return load_json(value)


def _function_test(given: Any, expected: Any) -> CodeTest:
    arguments = [load_json(line) for line in given.split("\n") if line.strip()] if isinstance(given, str) else given
    if not isinstance(arguments, list):
        raise ValueError(f"an input is {type(given).__name__}; write a list of arguments, or one JSON value per line")
    same_value(expected, expected)  # raises RecursionError if it is nested too deeply to be compared
    return CodeTest(stdin=dump_json(arguments).encode(), expected=expected)
