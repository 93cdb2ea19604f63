"""Provide tiny models with random weights for servers of Tinker's API."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def make_model_dir(tmp_path_factory):
    """seed -> the directory of a Qwen3 of one layer, width 64, 1024 positions, with random weights."""
    import torch
    from make_tiny_model import make_tokenizer
    from transformers import Qwen3Config, Qwen3ForCausalLM

    made: dict[int, Path] = {}
    tokenizer = make_tokenizer(["user\nWhat is 4 + 5?", "assistant\n", "It is 9."], vocab_size=512)

    def make(seed: int = 0) -> Path:
        if seed not in made:
            directory = tmp_path_factory.mktemp("models") / f"tiny-{seed}"
            config = Qwen3Config(
                vocab_size=512,
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
