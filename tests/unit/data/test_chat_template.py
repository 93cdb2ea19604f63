"""Test the chat templates that a user gives to models that have none."""

import pytest

from coati_rl.data.chat_template import set_chat_template
from coati_rl.errors import ConfigError

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


class Vocabulary:
    """The part of a tokenizer that chooses the end of a turn."""

    def __init__(self, tokens, eos_token):
        self.get_vocab = lambda: dict.fromkeys(tokens, 0)
        self.eos_token = eos_token


def test_chatml_ends_turns_with_its_own_token_or_with_the_end_of_the_sequence(tokenizer):
    import copy

    given = copy.deepcopy(tokenizer)
    set_chat_template(given, "chatml")
    end = given.eos_token
    assert given.apply_chat_template(TALK[:1], tokenize=False, add_generation_prompt=True) == (
        f"<|im_start|>user\nhi{end}\n<|im_start|>assistant\n"
    )
    assert given.apply_chat_template(TALK, tokenize=False).endswith(f"<|im_start|>assistant\nyo{end}\n")
    chatml = Vocabulary(["<|im_start|>", "<|im_end|>"], "<eos>")
    set_chat_template(chatml, "chatml")
    assert "<|im_end|>" in chatml.chat_template and "<eos>" not in chatml.chat_template
    with pytest.raises(ConfigError, match="no token that ends a turn"):
        set_chat_template(Vocabulary([], None), "chatml")


def test_a_file_is_a_template_or_is_refused(tokenizer, tmp_path):
    import copy

    given, file = copy.deepcopy(tokenizer), tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    set_chat_template(given, str(file))
    assert given.apply_chat_template(TALK, tokenize=False) == "[hi][yo]"
    file.write_text("{{ raise_exception('a system message is needed') }}")
    set_chat_template(given, str(file))  # rows that it refuses are named when they are rendered
    file.write_text("{% for m in messages %}\n{% endwhile %}")
    with pytest.raises(ConfigError, match=r"chat.jinja, line 2: is no Jinja template: .*endwhile"):
        set_chat_template(given, str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        set_chat_template(given, str(tmp_path / "none"))
