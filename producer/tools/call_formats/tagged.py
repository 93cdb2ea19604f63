"""Find calls between <tool_call> and </tool_call>; formats differ in what is between the tags."""

from abc import abstractmethod

from producer.tools.call_formats.answer import MAX_CALLS, CallSpan, SpanFormat, ToolCallError, WrittenCall
from producer.tools.call_formats.bounded_json import skip_space

_BEGIN, _END = "<tool_call>", "</tool_call>"


class TaggedFormat(SpanFormat):
    """Implement `ToolCallFormat` for calls between tags; text may stand before, between and after."""

    @abstractmethod
    def read_call(self, text: str, position: int) -> tuple[WrittenCall, int]:
        """Return the call at a position, and where it ends, white space included. Raises: ToolCallError."""

    def find(self, text: str, start: int) -> list[CallSpan]:
        spans: list[CallSpan] = []
        begin = text.find(_BEGIN, start)
        while begin >= 0 and len(spans) < MAX_CALLS:
            spans.append(self._span(text, begin))
            begin = text.find(_BEGIN, spans[-1].end)
        return spans

    def _span(self, text: str, begin: int) -> CallSpan:
        first = skip_space(text, begin + len(_BEGIN))
        # Templates write a line break before the tag, which belongs to it.
        start = begin - 1 if text[begin - 1 : begin] == "\n" else begin
        try:
            call, end = self.read_call(text, first)
            if not text.startswith(_END, end):
                raise ToolCallError(f"{_END} is missing after the call")
            return CallSpan(start=start, end=end + len(_END), calls=[call])
        except ToolCallError as error:
            ends = [end for end in (text.find(_END, first), text.find(_BEGIN, first)) if end >= 0]
            return CallSpan(start=start, end=min(ends, default=len(text)), errors=[str(error)])
