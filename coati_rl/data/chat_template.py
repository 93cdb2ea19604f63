"""Give a tokenizer the chat template of --chat-template."""

from typing import Any

from coati_rl.errors import ConfigError

_CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + 'END\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def set_chat_template(tokenizer: Any, template: str) -> None:
    """Set a template, or that of chatml.

    A turn of chatml ends with <|im_end|> if that is a token of the vocabulary, else with the end-of-sequence token.

    Raises: ConfigError for text that is no template, and for chatml without a token to end turns.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

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
    except TemplateError:
        return  # a conversation of one message may be refused; rows that are refused are named
