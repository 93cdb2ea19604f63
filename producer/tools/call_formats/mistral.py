"""Parse the calls of Mistral, in its three versions.

Up to v7: [TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}, ...]; v11: [TOOL_CALLS]name[CALL_ID]id[ARGS]{...};
v13: [TOOL_CALLS]name[ARGS]{...}, once for each call.
"""

import re

from producer.tools.call_formats.answer import MAX_CALLS, CallSpan, SpanFormat, ToolCallError, checked_call
from producer.tools.call_formats.bounded_json import call_from_object, decode, skip_space

_BEGIN = "[TOOL_CALLS]"
_HEAD = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]([A-Za-z0-9]{1,64}))?(?:\[ARGS\])?\s*(?=\{)")
_NEXT_IN_LIST = re.compile(r',\s*(?=\{\s*"name"\s*:)')


class MistralFormat(SpanFormat):
    """Implement `ToolCallFormat` for calls behind [TOOL_CALLS]."""

    name = "mistral"

    def find(self, text: str, start: int) -> list[CallSpan]:
        spans: list[CallSpan] = []
        begin = text.find(_BEGIN, start)
        while begin >= 0 and len(spans) < MAX_CALLS:
            first = skip_space(text, begin + len(_BEGIN))
            spans.append(_listed(text, begin, first) if text.startswith("[", first) else _single(text, begin, first))
            begin = text.find(_BEGIN, spans[-1].end)
        return spans


def _single(text: str, begin: int, first: int) -> CallSpan:
    try:
        head = _HEAD.match(text, first)
        value, end = decode(text, head.end() if head else first)
        call = checked_call(head[1], value, head[2]) if head else call_from_object(value)
    except ToolCallError as error:
        following = text.find(_BEGIN, first)
        return CallSpan(start=begin, end=following if following >= 0 else len(text), errors=[str(error)])
    return CallSpan(start=begin, end=end, calls=[call])


def _listed(text: str, begin: int, first: int) -> CallSpan:
    """Return the calls of a list; what follows one that cannot be read is looked for behind the next comma."""
    span = CallSpan(start=begin, end=len(text))
    position = skip_space(text, first + 1)
    for _ in range(MAX_CALLS):
        if text.startswith("]", position):
            span.end = position + 1
            return span
        try:
            value, position = decode(text, position)
            position = skip_space(text, position)
            span.calls.append(call_from_object(value))
            if not text.startswith((",", "]"), position):
                raise ToolCallError("the list of calls is not closed")
        except ToolCallError as error:
            span.errors.append(str(error))
            if not text.startswith((",", "]"), position):
                following = _NEXT_IN_LIST.search(text, position)
                if following is None:
                    break
                position = following.start()
        if text.startswith(",", position):
            position = skip_space(text, position + 1)
    return _with_end(text, span)


def _with_end(text: str, span: CallSpan) -> CallSpan:
    """End a list that is not closed where other calls begin."""
    following = text.find(_BEGIN, span.start + len(_BEGIN))
    span.end = following if following >= 0 else len(text)
    return span
