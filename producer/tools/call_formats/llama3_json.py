"""Parse the calls of Llama 3: {"name": ..., "parameters": {...}}, several of them separated by semicolons."""

import re

from producer.tools.call_formats.answer import MAX_CALLS, CallSpan, SpanFormat, ToolCallError
from producer.tools.call_formats.bounded_json import call_from_object, decode, skip_space

_TAG = "<|python_tag|>"  # before calls, in some models
_BEGIN = re.compile(r'\{\s*"(?:name|type|function)"\s*:')


class Llama3JsonFormat(SpanFormat):
    """Implement `ToolCallFormat` for objects with a name and parameters. Other objects are content."""

    name = "llama3_json"

    def find(self, text: str, start: int) -> list[CallSpan]:
        spans: list[CallSpan] = []
        for _ in range(MAX_CALLS):
            match = _BEGIN.search(text, start)
            if match is None:
                break
            span = _span(text, match.start(), after=start)
            start = span.end
            if span.calls or span.errors:
                spans.append(span)
        return spans


def _span(text: str, begin: int, *, after: int) -> CallSpan:
    start = _before(text, begin, after)
    try:
        value, end = decode(text, begin)
        if not _is_call(value):
            return CallSpan(start=begin, end=end)
        span = CallSpan(start=start, end=end, calls=[call_from_object(value)])
    except ToolCallError as error:
        following = _BEGIN.search(text, begin + 1)
        return CallSpan(start=start, end=following.start() if following else len(text), errors=[str(error)])
    following_end = skip_space(text, span.end)
    if text.startswith(";", following_end):
        span.end = following_end + 1
    return span


def _is_call(value: object) -> bool:
    described = value.get("function", value) if isinstance(value, dict) else None
    return isinstance(described, dict) and bool({"arguments", "parameters"} & described.keys())


def _before(text: str, begin: int, after: int) -> int:
    """Return where a call begins: with the tag, and with the space between it and an earlier call."""
    start = begin
    while start > after and text[start - 1] in " \n":
        start -= 1
    if text.endswith(_TAG, after, start):
        return start - len(_TAG)
    return start if start == after else begin
