"""Decode JSON that a model has written: strict, and bounded in depth, so that nothing built from it fails later."""

import json
import math
from typing import Any, NoReturn

from producer.tools.call_formats.answer import ToolCallError, WrittenCall, checked_call

_MAX_DEPTH = 32
_SPACE = " \t\r\n"


def _refuse(name: str) -> NoReturn:
    raise ToolCallError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


def skip_space(text: str, start: int) -> int:
    """Return the position of the first character from `start` that is not white space."""
    while start < len(text) and text[start] in _SPACE:
        start += 1
    return start


def decode(text: str, start: int) -> tuple[Any, int]:
    """Decode the value that begins at `start`. Returns: the value, and its end. Raises: ToolCallError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except ToolCallError:
        raise
    except json.JSONDecodeError as error:
        if error.pos >= len(text):
            raise ToolCallError("the JSON is not complete") from error
        raise ToolCallError(f"{error.msg} at character {error.pos - start + 1}") from error
    except RecursionError:
        raise ToolCallError(f"the JSON is nested more than {_MAX_DEPTH} deep") from None
    except ValueError as error:  # an integer of more than 4,300 digits
        raise ToolCallError("a number has too many digits") from error
    check_value(value)
    return value, end


def check_value(value: object) -> None:
    """Check a value of JSON types. Raises: ToolCallError if nested too deep, or if no chat template can render it."""
    level: list[object] = [value]
    for _ in range(_MAX_DEPTH):
        below: list[object] = []
        for part in level:
            if isinstance(part, str):
                _check_text(part)
            elif isinstance(part, float) and not math.isfinite(part):
                raise ToolCallError("a number is too large")
            elif isinstance(part, dict):
                below += part
                below += part.values()
            elif isinstance(part, list):
                below += part
        if not below:
            return
        level = below
    raise ToolCallError(f"the arguments are nested more than {_MAX_DEPTH} deep")


def call_from_object(value: object) -> WrittenCall:
    """Return the call that an object describes, as {"name", "arguments"}. Raises: ToolCallError.

    Arguments that are encoded once more, as in OpenAI's messages, are decoded.
    """
    if not isinstance(value, dict):
        raise ToolCallError('a call must be an object, {"name": ..., "arguments": {...}}')
    inner = value.get("function")
    described = inner if isinstance(inner, dict) else value
    arguments = described.get("arguments", described.get("parameters"))
    if isinstance(arguments, str):
        arguments = _decoded(arguments)
    return checked_call(described.get("name"), arguments, value.get("id"))


def _decoded(text: str) -> object:
    """Decode the whole of a text; an empty one stands for no arguments."""
    start = skip_space(text, 0)
    if start == len(text):
        return {}
    value, end = decode(text, start)
    return value if skip_space(text, end) == len(text) else text


def _check_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ToolCallError("a string holds half of a surrogate pair") from None
