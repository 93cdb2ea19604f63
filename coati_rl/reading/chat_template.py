"""Give a tokenizer the chat template, its variables and the date that it writes of a run's flags, and apply it.

Some templates write today's date (Llama 3.1, Granite, gpt-oss): they call `strftime_now`, a function that transformers
gives them. A run has one date, so that its prompts are the same in all its processes, and when it is resumed.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from inspect import signature
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.reading.row_messages import template_options_of
from coati_rl.reading.tool_arguments import with_object_arguments, with_text_arguments

VARIABLES_FLAG = "--chat-template-kwargs"
_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + 'END\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Set a template, or that of chatml.

    A turn of chatml ends with <|im_end|> if that is a token of the vocabulary, else with the end-of-sequence token.

    Raises: ConfigError for text that is no template, and for chatml without a token to end turns.
    """
    from jinja2 import TemplateSyntaxError

    if template == "chatml":
        end = "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else tokenizer.eos_token
        if end is None:
            raise ConfigError("--chat-template chatml: the tokenizer has no token that ends a turn; write a template")
        template = _CHATML.replace("END", end)
    tokenizer.chat_template = template
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "text"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template, line {error.lineno}: is no Jinja template: {error}") from error
    except Exception:  # noqa: BLE001 - a conversation of one message may be refused; rows that are refused are named
        return


def writes_date(tokenizer: Any) -> bool:
    """Return True if one of its templates may write today's date."""
    return "strftime_now" in str(tokenizer.chat_template)


def now() -> str:
    """Return the local date and time, as `set_variables` takes them."""
    return datetime.now().isoformat(timespec="seconds")


def set_variables(tokenizer: Any, *, date: str | None, variables: Mapping[str, Any]) -> None:
    """Let the templates of this tokenizer read variables, and write another date than today's.

    Args:
        tokenizer: changed in place, whoever applies its template; variables that are given then win, by name.
        date: local date, or date and time, in ISO format; None: today's.
        variables: of --chat-template-kwargs, by name, in place of those that were set before.
    Raises: ConfigError for what no column chat_template_kwargs of a row may hold.
    """
    tokenizer.__dict__.pop("apply_chat_template", None)
    given = template_options_of({"chat_template_kwargs": variables}, VARIABLES_FLAG)
    check_options(tokenizer, given, VARIABLES_FLAG)
    if date is not None:
        given["strftime_now"] = datetime.fromisoformat(date).strftime
    if given:
        tokenizer.apply_chat_template = partial(type(tokenizer).apply_chat_template, tokenizer, **given)


def reads(template: str, name: str) -> bool:
    """Return True if a template may read a variable: its name occurs in it."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def unread_warnings(tokenizer: Any, variables: Mapping[str, Any], *, is_applied: bool = True) -> Iterator[str]:
    """Return the variables of --chat-template-kwargs that no template of the tokenizer reads.

    Args:
        tokenizer: of the model, with the run's template.
        variables: of the flag.
        is_applied: rows are conversations, which the template renders.
    """
    for name in variables:
        if not is_applied:
            yield f"{VARIABLES_FLAG}: {name} has no effect, as rows are plain text"
        elif not reads(str(tokenizer.chat_template), name):
            yield f"{VARIABLES_FLAG}: {name} has no effect, as the model's chat template does not read it"


def template_of(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the template that transformers takes of a tokenizer with several, by the tools; empty if it has none."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        return templates or ""
    return str(templates.get("tool_use" if tools and "tool_use" in templates else "default", ""))


def apply_chat_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], where: str, **options: Any) -> Any:
    """Return what the tokenizer makes of messages.

    Arguments of tool calls are given as objects, and as JSON text where the template refuses objects.

    Args:
        tokenizer: with a chat template.
        messages: of a row.
        where: flag, file and row, for messages.
        options: of the tokenizer's own method.
    Raises: ConfigError naming the row, whatever an expression of the template raises.
    """
    try:
        return tokenizer.apply_chat_template(with_object_arguments(messages), **options)
    except Exception as error:
        if any(message.get("tool_calls") for message in messages):
            with suppress(Exception):  # the first refusal says more
                return tokenizer.apply_chat_template(with_text_arguments(messages), **options)
        what = str(error) or type(error).__name__
        raise ConfigError(f"{where}: the model's chat template refuses it: {what}") from error


def check_options(tokenizer: Any, options: Mapping[str, Any], where: str) -> None:
    """Refuse variables of chat_template_kwargs that the tokenizer's own method takes. Raises: ConfigError."""
    if not options:
        return
    parameters = signature(type(tokenizer).apply_chat_template).parameters
    own = {*parameters, "messages", "strftime_now", "raise_exception"} - {"documents"}
    if taken := [name for name in options if name in own]:
        raise ConfigError(
            f"{where}: chat_template_kwargs sets {taken[0]}, which is not the template's to read; leave it out"
        )
