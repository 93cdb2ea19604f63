"""Give a tokenizer the chat template of --chat-template."""

from pathlib import Path
from typing import Any

from coati_rl.errors import ConfigError

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + 'END\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def set_chat_template(tokenizer: Any, name: str) -> None:
    """Set the template in a file, or chatml.

    A turn of chatml ends with <|im_end|> if that is a token of the vocabulary, else with the end-of-sequence token.

    Raises: ConfigError for a file that cannot be read or is no template, and for chatml without a token to end turns.
    """
    if name == "chatml":
        end = "<|im_end|>" if "<|im_end|>" in tokenizer.get_vocab() else tokenizer.eos_token
        if end is None:
            raise ConfigError("--chat-template chatml: the tokenizer has no token that ends a turn; write a template")
        tokenizer.chat_template = _CHATML.replace("END", end)
        return
    try:
        tokenizer.chat_template = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {name}: cannot be read: {error}") from error
    from jinja2 import TemplateError, TemplateSyntaxError

    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "text"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(f"--chat-template {name}, line {error.lineno}: is no Jinja template: {error}") from error
    except TemplateError:
        return  # a conversation of one message may be refused; rows that are refused are named
