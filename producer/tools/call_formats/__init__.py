"""Parse tool calls from a model's answers, in the format that its chat template writes them in."""

from producer.tools.call_formats.answer import ParsedAnswer, ToolCall, ToolCallFormat
from producer.tools.call_formats.choice import FORMATS, answer_text, tool_format_for

__all__ = ["FORMATS", "ParsedAnswer", "ToolCall", "ToolCallFormat", "answer_text", "tool_format_for"]
