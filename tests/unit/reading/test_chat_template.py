"""Test the chat templates that a user gives to models that have none."""

import copy

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.chat_template import set_chat_template

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


def test_chatml_ends_turns_with_its_own_token_or_with_the_end_of_the_sequence(tokenizer):
    given = copy.deepcopy(tokenizer)
    set_chat_template(given, "chatml")
    end = given.eos_token
    assert given.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>user\nhi{end}\n<|im_start|>assistant\n"
    )
    assert given.apply_chat_template(TALK, tokenize=False).endswith(f"<|im_start|>assistant\nyo{end}\n")
    given.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    set_chat_template(given, "chatml")
    assert given.apply_chat_template(TALK, tokenize=False).endswith("yo<|im_end|>\n")


def test_chatml_needs_a_token_that_ends_turns(tokenizer):
    given = copy.deepcopy(tokenizer)
    given.eos_token = None
    with pytest.raises(ConfigError, match="no token that ends a turn"):
        set_chat_template(given, "chatml")


def test_text_is_a_template_or_is_refused(tokenizer):
    given = copy.deepcopy(tokenizer)
    set_chat_template(given, "{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert given.apply_chat_template(TALK, tokenize=False) == "[hi][yo]"
    set_chat_template(given, "{{ raise_exception('a system message is needed') }}")  # its rows are named when rendered
    with pytest.raises(ConfigError, match=r"--chat-template, line 2: is no Jinja template: .*endwhile"):
        set_chat_template(given, "{% for m in messages %}\n{% endwhile %}")
