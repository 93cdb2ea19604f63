"""Parse the calls of Hermes and Qwen: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from producer.tools.call_formats.answer import WrittenCall
from producer.tools.call_formats.bounded_json import call_from_object, decode, skip_space
from producer.tools.call_formats.tagged import TaggedFormat


class HermesFormat(TaggedFormat):
    """Implement `ToolCallFormat` for an object between the tags."""

    name = "hermes"

    def read_call(self, text: str, position: int) -> tuple[WrittenCall, int]:
        value, end = decode(text, position)
        return call_from_object(value), skip_space(text, end)
