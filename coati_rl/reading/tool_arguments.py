"""Give the arguments of tool calls to chat templates as objects, or as JSON text.

OpenAI's API writes arguments as JSON text, and templates encode what they get: text would be encoded twice. A few
templates take text alone (DeepSeek-V3).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]


def with_object_arguments(messages: Messages) -> list[dict[str, Any]]:
    """Return messages whose calls have objects as arguments; text that is no JSON object stays text."""
    return [_converted(message, as_text=False) for message in messages]


def with_text_arguments(messages: Messages) -> list[dict[str, Any]]:
    """Return messages whose calls have JSON text as arguments; text stays as it is."""
    return [_converted(message, as_text=True) for message in messages]


def argument_texts(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments of a message's calls that are text."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        for holder in (call, call.get("function")) if isinstance(call, Mapping) else ():
            if isinstance(holder, Mapping) and isinstance(holder.get("arguments"), str):
                yield holder["arguments"]


def _converted(message: Mapping[str, Any], *, as_text: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return dict(message)
    return {**message, "tool_calls": [_call(call, as_text) for call in calls]}


def _call(call: Any, as_text: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    made = dict(call)
    if isinstance(call.get("function"), Mapping):
        made["function"] = _call(call["function"], as_text)
    if "arguments" in call:
        made["arguments"] = (_as_text if as_text else _as_object)(call["arguments"])
    return made


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments or "{}")  # some clients write none so
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
