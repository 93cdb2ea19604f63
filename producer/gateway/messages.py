"""Bring chat messages into one form, whatever client wrote them.

A client sends an answer back with null fields, with its content as a list of parts, or with fields of its own; the
message has to be the one that was recorded all the same.
"""

import json
from typing import Any

from producer.environments.episode import Message
from producer.gateway.api_error import ApiError

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def normalised_messages(messages: Any) -> list[Message]:
    """Return messages with role, content and, where they have them, name, tool_calls, tool_call_id, reasoning_content.

    Raises: ApiError(400) that names the message at fault, such as one with an image.
    """
    if not isinstance(messages, list) or not messages:
        raise ApiError(400, "messages: needs a list of at least one message", param="messages", code="invalid_value")
    return [_normalised(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalised(message: Any, place: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise _refusal(f"{place}.role", f"needs one of {', '.join(_ROLES)}")
    found: Message = {"role": _ROLES[role], "content": _text(message.get("content"), f"{place}.content")}
    for name in ("name", "reasoning_content"):
        if message.get(name) is not None:
            found[name] = _string(message[name], f"{place}.{name}")
    if role == "assistant" and message.get("tool_calls"):
        found["tool_calls"] = _calls(message["tool_calls"], f"{place}.tool_calls")
    if role == "tool":
        found["tool_call_id"] = _string(message.get("tool_call_id"), f"{place}.tool_call_id")
    if message.get("function_call") is not None:
        raise _refusal(f"{place}.function_call", "is not supported: use tool_calls")
    return found


def _text(content: Any, place: str) -> str:
    """Join the text of content parts with line breaks, as vLLM's server does."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(place, "needs a text, or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise _refusal(f"{place}[{index}]", f"a part of type {kind} is not supported: this model reads text alone")
        texts.append(_string(part.get("text"), f"{place}[{index}].text"))
    return "\n".join(texts)


def _calls(calls: Any, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _refusal(place, "needs a list")
    return [_call(call, f"{place}[{index}]") for index, call in enumerate(calls)]


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise _refusal(place, 'needs {"id", "type": "function", "function": {"name", "arguments"}}')
    name = _string(function.get("name"), f"{place}.function.name")
    arguments = _string(function.get("arguments"), f"{place}.function.arguments") or "{}"  # some clients write none so
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise _refusal(f"{place}.function.arguments", "needs the text of a JSON object")
    call_id = _string(call.get("id"), f"{place}.id")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _string(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise _refusal(place, "needs a text")
    return value


def _refusal(place: str, message: str) -> ApiError:
    return ApiError(400, f"{place}: {message}", param=place, code="invalid_value")
