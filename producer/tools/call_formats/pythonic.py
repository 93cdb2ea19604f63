"""Parse the calls of Llama 4, Llama 3.2 and LFM2: a list of Python calls, [name(parameter=value, ...), ...].

Values are literals. A parser of ours reads them: Python's may overflow the stack, and refuses all calls for a bad one.
"""

import re
from typing import Any

from producer.tools.call_formats.answer import MAX_CALLS, CallSpan, SpanFormat, ToolCallError, WrittenCall, checked_call
from producer.tools.call_formats.bounded_json import check_value

_MARKERS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
_BEGIN = re.compile(r"\s*\[\s*(?=[A-Za-z_][\w.-]*\()")
_MARKED = re.compile("|".join(map(re.escape, _MARKERS)))
_NEXT = re.compile(r"\)\s*,\s*(?=[A-Za-z_][\w.-]*\()")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_PARAMETER = re.compile(r"([A-Za-z_]\w*)\s*=\s*")
_SPACE = re.compile(r"\s*")
_STRING = re.compile(
    r'"""((?:[^\\]|\\.)*?)"""' r"|'''((?:[^\\]|\\.)*?)'''" r'|"((?:[^"\\\n]|\\.)*)"' r"|'((?:[^'\\\n]|\\.)*)'",
    re.DOTALL,
)
_NUMBER = re.compile(
    r"[+-]?(?:(\d{1,4000})(?![\d.eE])|(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,4})?)", re.ASCII
)
_CONSTANT = re.compile(r"(True|true|False|false|None|null)\b")
_CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_MAX_DEPTH = 32


class PythonicFormat(SpanFormat):
    """Implement `ToolCallFormat` for a list of calls, between the model's markers or as the answer's beginning."""

    name = "pythonic"

    def find(self, text: str, start: int) -> list[CallSpan]:
        spans: list[CallSpan] = []
        match, begin = _MARKED.search(text, start), _BEGIN.match(text, start)
        if begin is not None:  # without a marker; one may be in an argument
            span = _listed(text, start, begin.end(), end_marker="")
            if match is None or (not span.errors and match.start() < span.end):
                return [span]
        while match is not None and len(spans) < MAX_CALLS:
            begin = _BEGIN.match(text, match.end())
            if begin is None:
                span = CallSpan(
                    start=match.start(), end=match.end(), errors=["calls are a list, [name(parameter=value)]"]
                )
            else:
                span = _listed(text, match.start(), begin.end(), end_marker=_MARKERS[match[0]])
            spans.append(span)
            match = _MARKED.search(text, span.end)
        return spans


def _listed(text: str, start: int, position: int, *, end_marker: str) -> CallSpan:
    """Return the calls from `position` on; what follows one that cannot be read begins behind its bracket."""
    span = CallSpan(start=start, end=len(text))
    for _ in range(MAX_CALLS):
        try:
            call, position = _call(text, position)
            span.calls.append(call)
            position = _skip(text, position)
            if text.startswith("]", position):
                break
            if not text.startswith(",", position):
                raise ToolCallError("the list of calls is not closed")
            position = _skip(text, position + 1)
        except ToolCallError as error:
            span.errors.append(str(error))
            following = _NEXT.search(text, position)
            if following is None:
                return span
            position = following.end()
    position = _skip(text, position + 1)
    span.end = position + len(end_marker) if text.startswith(end_marker, position) else position
    return span


def _call(text: str, position: int) -> tuple[WrittenCall, int]:
    name = _NAME.match(text, position)
    if name is None or not text.startswith("(", name.end()):
        raise ToolCallError("a call is written name(parameter=value)")
    arguments: dict[str, Any] = {}
    position = _skip(text, name.end() + 1)
    while not text.startswith(")", position):
        parameter = _PARAMETER.match(text, position)
        if parameter is None:
            raise ToolCallError(f"the arguments of {name[0][:64]} must be written parameter=value")
        arguments[parameter[1]], position = _value(text, parameter.end(), depth=0)
        position = _after_part(text, position, ")")
    check_value(arguments)
    return checked_call(name[0], arguments), position + 1


def _value(text: str, position: int, *, depth: int) -> tuple[Any, int]:
    if depth == _MAX_DEPTH:
        raise ToolCallError(f"the arguments are nested more than {_MAX_DEPTH} deep")
    first = text[position : position + 1]
    if first and first in "[(":
        return _list(text, position + 1, "]" if first == "[" else ")", depth=depth)
    if first == "{":
        return _dictionary(text, position + 1, depth=depth)
    if (string := _STRING.match(text, position)) is not None:
        quoted = next(group for group in string.groups() if group is not None)
        return _ESCAPE.sub(_unescaped, quoted), string.end()
    if (constant := _CONSTANT.match(text, position)) is not None:
        return _CONSTANTS[constant[0].lower()], constant.end()
    if (number := _NUMBER.match(text, position)) is not None:
        return (int(number[0]) if number[1] else float(number[0])), number.end()
    raise ToolCallError("the call is not complete" if position >= len(text) else "a value is not a literal")


def _list(text: str, position: int, end: str, *, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    position = _skip(text, position)
    while not text.startswith(end, position):
        value, position = _value(text, position, depth=depth + 1)
        values.append(value)
        position = _after_part(text, position, end)
    return values, position + 1


def _dictionary(text: str, position: int, *, depth: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    position = _skip(text, position)
    while not text.startswith("}", position):
        key, position = _value(text, position, depth=depth + 1)
        position = _skip(text, position)
        if not isinstance(key, str) or not text.startswith(":", position):
            raise ToolCallError("a dictionary is written {'key': value}")
        values[key], position = _value(text, _skip(text, position + 1), depth=depth + 1)
        position = _after_part(text, position, "}")
    return values, position + 1


def _after_part(text: str, position: int, end: str) -> int:
    """Skip the comma behind a part, which the last one may lack. Returns: where the next part, or `end`, begins."""
    position = _skip(text, position)
    if text.startswith(",", position):
        return _skip(text, position + 1)
    if not text.startswith(end, position):
        raise ToolCallError("the call is not complete" if position >= len(text) else f"{end} or a comma is missing")
    return position


def _skip(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


def _unescaped(escape: "re.Match[str]") -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits is not None:
        if int(digits, 16) > 0x10FFFF:
            raise ToolCallError("a string has an escape that is no character")
        return chr(int(digits, 16))
    character = escape[4]
    if character in "\\'\"":
        return character
    return _ESCAPES.get(character, f"\\{character}")
