"""Provide a small tokenizer and model. Heavy libraries are imported where they are used."""

import pytest

from tests.tiny_models import make_writer

EOS_TOKEN = "<|endoftext|>"

# A line per message; a role it does not know is refused, as the templates of real models do.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{{ message.role[0] }}:{{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """One token a byte (256 of them), and an end: every text has as many tokens as UTF-8 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([EOS_TOKEN])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=EOS_TOKEN, pad_token=EOS_TOKEN, chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def make_model_dir(tokenizer, tmp_path_factory):
    """seed -> the directory of a tiny model with a vocabulary of 272, see `make_writer`."""
    return make_writer(tokenizer, 272, tmp_path_factory)


@pytest.fixture(scope="session")
def model_dir(make_model_dir):
    return make_model_dir()
