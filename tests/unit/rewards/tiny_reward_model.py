"""Write a tiny reward model: a random Qwen3 with one label, a tokenizer of bytes and a chat template."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification

TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
)
SPECIAL = ["</s>", "<user>", "<assistant>"]
MAX_TOKENS = 64


def make_tokenizer(*, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Each byte is a token; the last token of a conversation is the padding token, too, as of many models."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def write_reward_model(directory: Path, *, template: str | None = TEMPLATE, **settings: Any) -> Path:
    """Write the model to `directory`; `settings` change its configuration."""
    torch.manual_seed(1)
    tokenizer = make_tokenizer(template=template)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen3Config(
        **{
            **sizes,
            "vocab_size": len(tokenizer),
            "head_dim": 16,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_TOKENS,
            "pad_token_id": tokenizer.pad_token_id,
            "num_labels": 1,
            **settings,
        }
    )
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory
