"""Choose the format of tool calls: by name, or as the one in which the model's own template writes a call."""

from collections.abc import Sequence
from typing import Any

from coati_rl.errors import ConfigError
from coati_rl.reading.special_tokens import is_special
from producer.tools.call_formats.answer import ToolCallFormat
from producer.tools.call_formats.hermes import HermesFormat
from producer.tools.call_formats.llama3_json import Llama3JsonFormat
from producer.tools.call_formats.mistral import MistralFormat
from producer.tools.call_formats.pythonic import PythonicFormat
from producer.tools.call_formats.qwen_xml import QwenXmlFormat
from producer.tools.tool import typed_arguments

# Llama's is the last to be tried: its calls have no mark, and those of Hermes and Mistral hold such objects.
FORMATS: dict[str, ToolCallFormat] = {
    one.name: one for one in (HermesFormat(), QwenXmlFormat(), MistralFormat(), PythonicFormat(), Llama3JsonFormat())
}
AUTO = "auto"
_TOKENS = {  # of a vocabulary that was made for a format
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<|python_tag|>": "llama3_json",
    "<|tool_call_start|>": "pythonic",
    "<|python_start|>": "pythonic",
}
_NAME, _ARGUMENTS, _ID = "coati_example", {"text": 'a "quoted" </line>\n', "number": 3}, "abcdefghi"
_QUESTION = "coati asks"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Serve as an example.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["text", "number"],
        },
    },
}


def tool_format_for(tokenizer: Any, name: str = AUTO) -> ToolCallFormat:
    """Return the format in which a model writes calls.

    Args:
        tokenizer: with the model's chat template.
        name: of a format, or "auto": the one that reads back a call as the template renders it; of a template that
            renders no calls, the one whose token the vocabulary has.
    Raises: ConfigError, with the choices, if none does.
    """
    if name != AUTO:
        if name not in FORMATS:
            raise ConfigError(f"--tool-format {name!r}: use one of {', '.join((AUTO, *FORMATS))}")
        return FORMATS[name]
    rendered = _rendered_call(tokenizer)
    for one in FORMATS.values():
        calls = one.parse(rendered).calls
        if any((call.name, typed_arguments(_TOOL, call.arguments)) == (_NAME, _ARGUMENTS) for call in calls):
            return one
    if _NAME not in rendered:
        vocabulary = tokenizer.get_vocab()
        for token, format_name in _TOKENS.items():
            if token in vocabulary:
                return FORMATS[format_name]
    raise ConfigError(
        "--tool-format auto: the model's chat template writes tool calls in none of the known formats; "
        f"name the one that the model writes: {', '.join(FORMATS)}"
    )


def answer_text(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Decode an answer for `ToolCallFormat.parse`: with its special tokens, without those at its end."""
    named, end = set(tokenizer.all_special_ids), len(token_ids)
    while end and (token_ids[end - 1] in named or is_special(tokenizer, token_ids[end - 1])):
        end -= 1
    text: str = tokenizer.decode(list(token_ids[:end]), skip_special_tokens=False)
    return text


def _rendered_call(tokenizer: Any) -> str:
    """Return how the template renders an assistant's call, or nothing if it refuses to."""
    from jinja2 import TemplateError

    question = {"role": "user", "content": _QUESTION}
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        prompt = tokenizer.apply_chat_template([question], tools=[_TOOL], tokenize=False, add_generation_prompt=True)
        rendered: str = tokenizer.apply_chat_template([question, answer], tools=[_TOOL], tokenize=False)
    except (TemplateError, TypeError, ValueError):
        return ""
    if rendered.startswith(prompt):
        return rendered[len(prompt) :]
    return rendered[rendered.rfind(_QUESTION) + len(_QUESTION) :]
