"""Parse the calls of Qwen3-Coder, Qwen3.5 and Nemotron 3, in tags.

<tool_call><function=name><parameter=x>1</parameter></function></tool_call>, with a line break around each value. Values
are texts; what they stand for is in the tool's schema (`typed_arguments`).
"""

import re

from producer.tools.call_formats.answer import ToolCallError, WrittenCall, checked_call
from producer.tools.call_formats.bounded_json import check_value, skip_space
from producer.tools.call_formats.tagged import TaggedFormat

_FUNCTION = re.compile(r"<function=([^<>\n]{1,128})>")
_PARAMETER = re.compile(r"<parameter=([^<>\n]{1,128})>\n?")
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_MAX_PARAMETERS = 128


class QwenXmlFormat(TaggedFormat):
    """Implement `ToolCallFormat` for a tag for each parameter."""

    name = "qwen_xml"

    def read_call(self, text: str, position: int) -> tuple[WrittenCall, int]:
        function = _FUNCTION.match(text, position)
        if function is None:
            raise ToolCallError("a call begins with <function=name>")
        arguments: dict[str, str] = {}
        position = skip_space(text, function.end())
        while not text.startswith(_FUNCTION_END, position):
            parameter = _PARAMETER.match(text, position)
            if parameter is None or len(arguments) == _MAX_PARAMETERS:
                raise ToolCallError(f"<parameter=name> or {_FUNCTION_END} is missing")
            end = text.find(_PARAMETER_END, parameter.end())
            if end < 0:
                raise ToolCallError(f"{_PARAMETER_END} is missing")
            arguments[parameter[1]] = text[parameter.end() : end].removesuffix("\n")
            position = skip_space(text, end + len(_PARAMETER_END))
        check_value(arguments)
        return checked_call(function[1], arguments), skip_space(text, position + len(_FUNCTION_END))
