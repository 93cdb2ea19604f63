"""Provide a small tokenizer and model. Heavy libraries are imported where they are used."""

from pathlib import Path

import pytest

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
    """seed -> the directory of a Qwen3 of one layer, width 64, vocabulary 272, 1024 positions, with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    made: dict[int, Path] = {}

    def make(seed: int = 0) -> Path:
        if seed not in made:
            directory = tmp_path_factory.mktemp("models") / f"tiny-{seed}"
            config = Qwen3Config(
                vocab_size=272,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=32,
                max_position_embeddings=1024,
                tie_word_embeddings=True,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
            )
            torch.manual_seed(seed)
            Qwen3ForCausalLM(config).save_pretrained(directory)
            tokenizer.save_pretrained(directory)
            made[seed] = directory
        return made[seed]

    return make


@pytest.fixture(scope="session")
def model_dir(make_model_dir):
    return make_model_dir()
