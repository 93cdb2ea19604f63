"""Parse the calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from producer.tools.call_formats.answer import MAX_CALLS, CallError, Span, SpanFormat
from producer.tools.call_formats.bounded_json import call_from_object, decode, skip_space

_BEGIN, _END = "<tool_call>", "</tool_call>"


class HermesFormat(SpanFormat):
    """Implement `ToolCallFormat` for an object between tags; text may stand before, between and after."""

    name = "hermes"

    def find(self, text: str, start: int) -> list[Span]:
        """See `SpanFormat.find`."""
        spans: list[Span] = []
        begin = text.find(_BEGIN, start)
        while begin >= 0 and len(spans) < MAX_CALLS:
            spans.append(_span(text, begin))
            begin = text.find(_BEGIN, spans[-1].end)
        return spans


def _span(text: str, begin: int) -> Span:
    first = skip_space(text, begin + len(_BEGIN))
    # Templates write a line break before the tag, which belongs to it.
    start = begin - 1 if text[begin - 1 : begin] == "\n" else begin
    try:
        value, end = decode(text, first)
        end = skip_space(text, end)
        if not text.startswith(_END, end):
            raise CallError(f"{_END} is missing after the object")
        return Span(start=start, end=end + len(_END), calls=[call_from_object(value)])
    except CallError as error:
        ends = [end for end in (text.find(_END, first), text.find(_BEGIN, first)) if end >= 0]
        return Span(start=start, end=min(ends, default=len(text)), errors=[str(error)])
