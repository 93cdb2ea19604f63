"""Parse the JSON of rows, and refuse what Python's parser takes and nothing after it can use.

Tokenizers take no half of a surrogate pair, templates and other processes no deep nesting. Python itself refuses
integers of more than 4,300 digits, without saying where; here the caller names the row.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 100  # of lists and objects in each other

_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\n\r]*")
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile("[\ud800-\udfff]")


class UnusableJsonError(ValueError):
    """Report JSON that cannot be used; the message says what it holds, and what to write instead."""


def parse_json(text: str) -> Any:
    """Return the value of a JSON text. Raises: json.JSONDecodeError; UnusableJsonError."""
    value, end = parse_json_at(text, after_blank(text, 0))
    if after_blank(text, end) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)
    return value


def parse_json_at(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at a place, and where it ends. Raises: json.JSONDecodeError; UnusableJsonError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise UnusableJsonError(_too_deep()) from error
    except ValueError as error:  # Python's limit of the digits of an integer
        raise UnusableJsonError(
            f"holds an integer of more than {sys.get_int_max_str_digits()} digits; write it as text"
        ) from error
    if text.count("[", start, end) + text.count("{", start, end) > MAX_DEPTH or _ESCAPED_SURROGATE.search(
        text, start, end
    ):
        check_json(value)
    return value, end


def check_json(value: Any, column: str = "") -> None:
    """Raise UnusableJsonError for a column's value that is nested too deep, or holds what no JSON or tokenizer has."""
    if _is_deep(value):
        raise UnusableJsonError(f"{column} {_too_deep()}".lstrip())
    if (problem := _problem(value, column)) is not None:
        raise UnusableJsonError(problem)


def json_of_text(value: Any) -> Any:
    """Return the list or object that a value is JSON text of, unchecked, as in columns of CSV; else the value."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def json_values(text: str) -> Iterator[Any]:
    """Yield the elements of a text's list, or the values that follow one another: an object, or JSON Lines.

    Raises: as `parse_json`.
    """
    place = after_blank(text, 0)
    if not text.startswith("[", place):
        while place < len(text):
            value, place = parse_json_at(text, place)
            place = after_blank(text, place)
            yield value
        return
    place = after_blank(text, place + 1)
    is_open = not text.startswith("]", place)
    while is_open:
        value, place = parse_json_at(text, place)
        yield value
        place = after_blank(text, place)
        is_open = text.startswith(",", place)
        if not is_open and not text.startswith("]", place):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, place)
        place = after_blank(text, place + is_open)
    if (end := after_blank(text, place + 1)) != len(text):
        raise json.JSONDecodeError("Extra data", text, end)


def after_blank(text: str, start: int) -> int:
    """Return the first place from `start` on that is not JSON's white space."""
    blank = _BLANK.match(text, start)
    assert blank is not None  # noqa: S101, it may be empty
    return blank.end()


def _too_deep() -> str:
    return f"is nested more than {MAX_DEPTH} deep; write what is deeper as text"


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return False
    return any(isinstance(each, dict | list) for each in level)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value.values()]
    return [*value] if isinstance(value, list | tuple) else []


def _problem(value: Any, column: str = "") -> str | None:
    """Return what a value holds that nothing can use, else None; `column` is the row's that it is in."""
    if isinstance(value, dict):
        parts = ((_problem(key, column) or _problem(part, column or key)) for key, part in value.items())
        return next((part for part in parts if part is not None), None)
    if isinstance(value, list | tuple):
        return next((each for part in value if (each := _problem(part, column)) is not None), None)
    holds = f"{column} holds".lstrip()
    if not isinstance(value, str):
        is_json = value is None or isinstance(value, bool | int | float)
        return None if is_json else f"{holds} a {type(value).__name__}, which JSON does not have; write it as text"
    half = None if value.isascii() else _SURROGATE.search(value)
    if half is None:
        return None
    return f"{holds} \\u{ord(half[0]):04x}, half of a surrogate pair, which no tokenizer takes; write both halves"
