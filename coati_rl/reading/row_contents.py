"""Read the values of a row's columns: messages or text, prompts with their completions, labels.

Text of JSON that holds messages, as in CSV, is messages; `row_messages` brings them into one form.
"""

from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.reading.forms import Content, Messages
from coati_rl.reading.row_messages import is_missing, messages_of_value, plain_messages

_TRUE, _FALSE = ("true", "1", "1.0"), ("false", "0", "0.0")


def content_of(value: Any, name: str, where: str) -> Content:
    """Return messages, checked one by one, or text. Raises: ConfigError for anything else."""
    messages = messages_of_value(value)
    if messages is None:
        if isinstance(value, str):
            return value
        raise ConfigError(f'{where}: {name} is {type(value).__name__}; write text, or a list of {{"role", "content"}}')
    return tuple(plain_messages(messages, name, where))


def completions_of(prompt: Any, completion: Any, template: str | None, where: str) -> tuple[Content, Content]:
    """Return prompt and completion of one kind; without a prompt, the last message is the completion of the others."""
    said = _said(completion, "completion", where)
    if is_missing(prompt):
        if isinstance(said, str):
            return "", said
        return _from_assistant(said[:-1], said[-1:], "completion", where)
    return _joined(content_of(prompt, "prompt", where), said, template, "completion", where)


def paired_completions(
    prompt: Any, chosen: Any, rejected: Any, template: str | None, where: str
) -> tuple[Content, Content, Content]:
    """Return prompt, chosen and rejected of one kind; without a prompt, it is what the two have in common.

    Raises: ConfigError if one is empty, or they are of different kinds.
    """
    one, other = _said(chosen, "chosen", where), _said(rejected, "rejected", where)
    if isinstance(one, str) is not isinstance(other, str):
        raise ConfigError(f"{where}: one of chosen and rejected is text, the other messages; write both alike")
    if isinstance(one, tuple) and isinstance(other, tuple) and _holds_prompt(one, prompt):
        return _common_messages(one, other, where)
    if is_missing(prompt):
        assert isinstance(one, str) and isinstance(other, str)  # noqa: S101, messages hold their prompt
        return _common_text(one, other)
    asked = content_of(prompt, "prompt", where)
    start, good = _joined(asked, one, template, "chosen", where)
    return start, good, _joined(asked, other, template, "rejected", where)[1]


def truth_of_label(value: object, what: str) -> bool:
    """Return a label: true or false, 1 or 0, or, as CSV knows text alone, text of these. Raises: ConfigError."""
    text = str(value).strip().lower()
    if not isinstance(value, bool | int | float | str) or text not in (*_TRUE, *_FALSE):
        raise ConfigError(f"{what} is {value!r}; write true or false (or 1 or 0)")
    return text in _TRUE


def step_labels(value: Any, where: str) -> tuple[float, ...]:
    """Return a number from 0 to 1 for each label of steps: true, false, "+", "-" or a number. Raises: ConfigError."""
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where}: its labels are {type(value).__name__}; write a list with one for each step")
    return tuple(_step_label(each, f"{where}: label {number}") for number, each in enumerate(value, 1))


def _step_label(value: object, what: str) -> float:
    if value in ("+", "-"):
        return float(value == "+")
    if isinstance(value, float | int) and not isinstance(value, bool):
        if 0.0 <= value <= 1.0:
            return float(value)
        raise ConfigError(f"{what} is {value!r}; write a number from 0 (wrong) to 1 (right)")
    return float(truth_of_label(value, what))


def _said(value: Any, name: str, where: str) -> Content:
    """Return a completion that says something."""
    content = content_of(value, name, where)
    last = content if isinstance(content, str) else content[-1].get("content", "") if content else ""
    if not last.strip() and not (isinstance(content, tuple) and content and content[-1].get("tool_calls")):
        raise ConfigError(f"{where}: its {name} is empty; write the completion, or leave the row out")
    return content


def _joined(
    prompt: Content, completion: Content, template: str | None, name: str, where: str
) -> tuple[Content, Content]:
    """Return prompt and completion of one kind; a completion that repeats its prompt loses it."""
    if isinstance(completion, str):
        if isinstance(prompt, str):
            if template is not None:
                return template.replace("{}", prompt), completion
            prompt = ({"role": "user", "content": prompt},)
        return _from_assistant(prompt, ({"role": "assistant", "content": completion},), name, where)
    if isinstance(prompt, str):
        if completion[0]["role"] != "assistant":  # a whole conversation, whose prompt stands beside it as text
            return _from_assistant(completion[:-1], completion[-1:], name, where)
        prompt = ({"role": "user", "content": prompt},)
    if completion[: len(prompt)] == prompt:
        completion = completion[len(prompt) :]
    return _from_assistant(prompt, completion, name, where)


def _holds_prompt(chosen: Messages, prompt: Any) -> bool:
    """True if a completion is a whole conversation; a prompt beside it may be its text."""
    return is_missing(prompt) or (
        isinstance(prompt, str) and messages_of_value(prompt) is None and chosen[0]["role"] != "assistant"
    )


def _common_messages(chosen: Messages, rejected: Messages, where: str) -> tuple[Messages, Messages, Messages]:
    """Split off the messages that both begin with; equal ones keep their last."""
    shortest = min(len(chosen), len(rejected)) - 1
    split = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    if chosen[split]["role"] != "assistant":
        raise ConfigError(f"{where}: chosen and rejected differ before the assistant's turn; write pairs of one prompt")
    prompt, rest = _from_assistant(chosen[:split], chosen[split:], "chosen", where)
    return prompt, rest, _from_assistant(prompt, rejected[split:], "rejected", where)[1]


def _common_text(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split off the words that both begin with; the space after them belongs to the completions."""
    shortest = min(len(chosen), len(rejected)) - 1
    split = next((i for i in range(shortest) if chosen[i] != rejected[i]), shortest)
    while split and not (chosen[split].isspace() and rejected[split].isspace()):
        split -= 1
    return chosen[:split], chosen[split:], rejected[split:]


def _from_assistant(prompt: Messages, completion: Messages, name: str, where: str) -> tuple[Messages, Messages]:
    if not prompt:
        raise ConfigError(f"{where}: {name} has no message before the assistant's; write the prompt too")
    if not completion or completion[0]["role"] != "assistant":
        role = completion[0]["role"] if completion else None
        raise ConfigError(f"{where}: {name} goes on after the prompt with the role {role}; it must be the assistant's")
    return prompt, completion
