"""Bring the messages of rows into one form, whatever system or file format wrote them.

| in a row | here |
|---|---|
| a null beside other keys, at any depth | no key: tables give every object the keys of all others |
| content as a list of text parts | their text, joined with line breaks, as `coati-rl serve` joins it |
| `{"from": "human", "value": text}`, as ShareGPT writes | `{"role": "user", "content": text}` |
| `weight` of a turn of the assistant's | 0 or 1: whether the turn is trained |

Arguments of tool calls that are JSON text stay as they are; the chat template gets them as objects
(`coati_rl.reading.tool_arguments`). Nulls in that text, and in lists, are kept in every format.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.reading.json_text import UnusableJsonError, check_json, json_of_text, parse_json
from coati_rl.reading.tool_arguments import argument_texts

_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "observation": "tool"}  # of speakers
_CALL = "function_call"  # the speaker of a turn that is JSON text of the call
_KNOWN = ("system", "user", "assistant", "tool")


def is_missing(value: object) -> bool:
    """True for a column that holds nothing."""
    return value in (None, "", [], {})


def messages_of_value(value: object) -> list[Any] | None:
    """Return the list of messages that a value is, or is JSON text of; None for anything else."""
    value = json_of_text(value)
    if isinstance(value, Mapping):
        value = [value]
    if isinstance(value, list | tuple) and all(_is_message(each) for each in value):
        return list(value)
    return None


def plain_messages(messages: Sequence[Any], name: str, where: str) -> list[dict[str, Any]]:
    """Return messages, one by one, in one form.

    Args:
        messages: as read.
        name: of their column.
        where: flag, file and row, for messages.
    Raises: ConfigError naming the message that is none, or that holds anything but text.
    """
    _check_usable(messages, name, where)
    return [_plain(message, f"{where}: {name}, message {number}") for number, message in enumerate(messages, 1)]


def conversation_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Return the messages of the column `conversations`, after the text of the column `system`; None without them."""
    messages = None if is_missing(row.get("conversations")) else messages_of_value(row["conversations"])
    system = row.get("system")
    if messages is None or not isinstance(system, str) or not system:
        return messages
    has_own = "system" in (messages[0].get("role"), messages[0].get("from"))
    return messages if has_own else [{"role": "system", "content": system}, *messages]


def is_completion(value: object) -> bool:
    """Return True for text, and for messages that begin with the assistant's: their prompt stands elsewhere."""
    messages = messages_of_value(value)
    if not messages:
        return isinstance(value, str)
    return "assistant" in (messages[0].get("role"), _ROLES.get(messages[0].get("from")))


def tools_of(row: Mapping[str, Any], where: str) -> tuple[dict[str, Any], ...]:
    """Return the schemas of a row's column `tools`, a list or JSON text of it. Raises: ConfigError."""
    tools = json_of_text(row.get("tools"))
    if is_missing(tools):
        return ()
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ConfigError(f"{where}: tools is no list of JSON schemas")
    _check_usable(tools, "tools", where)
    return tuple(_without_nulls(tool) for tool in tools)


def template_options_of(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what a row's column `chat_template_kwargs` gives to the chat template, by name. Raises: ConfigError."""
    options = json_of_text(row.get("chat_template_kwargs"))
    if is_missing(options):
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"{where}: chat_template_kwargs is {type(options).__name__}; write an object of the template's variables, "
            'such as {"enable_thinking": false}'
        )
    _check_usable(options, "chat_template_kwargs", where)
    kept: dict[str, Any] = _without_nulls(options)
    return kept


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _check_usable(value: Any, name: str, where: str) -> None:
    """Refuse what JSON text in a column may hold, and types of tables that JSON lacks, such as times."""
    try:
        check_json(value, name)
    except UnusableJsonError as error:
        raise ConfigError(f"{where}: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list | tuple) else value


def _plain(message: Any, what: str) -> dict[str, Any]:
    kept: dict[str, Any] = _without_nulls(message) if isinstance(message, Mapping) else {}
    if "role" not in kept and isinstance(kept.get("from"), str):
        kept = _with_role(kept, what)
    if isinstance(kept.get("content"), list):
        kept["content"] = _text_of_parts(kept["content"], what)
    is_call = kept.get("role") == "assistant" and bool(kept.get("tool_calls"))
    if not isinstance(kept.get("role"), str) or not isinstance(kept.get("content", "" if is_call else None), str):
        raise ConfigError(f'{what} is not {{"role": ..., "content": text}}')
    if kept["role"] == "assistant":
        _check_turn(kept, what)
    return kept


def _with_role(message: dict[str, Any], what: str) -> dict[str, Any]:
    """Return a turn of ShareGPT as a message."""
    speaker, said = message["from"], message.get("value")
    rest = {key: part for key, part in message.items() if key not in ("from", "value")}
    if speaker == _CALL:
        calls = json_of_text(said)
        calls = [calls] if isinstance(calls, Mapping) else calls
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) and "name" in call for call in calls):
            raise ConfigError(f'{what} is no call; write JSON text of {{"name", "arguments"}}')
        made = [{"type": "function", "function": dict(call)} for call in calls]
        return {"role": "assistant", "content": "", "tool_calls": made, **rest}
    role = _ROLES.get(speaker, speaker)
    if role not in _KNOWN:
        raise ConfigError(f"{what} is from {speaker!r}; write one of {', '.join((*_ROLES, _CALL, *_KNOWN))}")
    return {"role": role, **({} if said is None else {"content": said}), **rest}


def _text_of_parts(parts: list[Any], what: str) -> str:
    texts = []
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ConfigError(f"{what} has a part of type {kind}; models here read text alone: write text parts")
        texts.append(part["text"])
    return "\n".join(texts)


def _check_turn(message: dict[str, Any], what: str) -> None:
    """Check what a turn of the assistant's may hold besides text."""
    if (weight := message.get("weight", 1)) not in (0, 1):
        raise ConfigError(f"{what} has the weight {weight!r}; write 1, or 0 for a turn that is not trained")
    for text in argument_texts(message):
        try:
            parse_json(text)
        except UnusableJsonError as error:
            raise ConfigError(f"{what}: the text of arguments {error}") from error
        except ValueError:
            continue  # what a model wrote that was no JSON stays text
