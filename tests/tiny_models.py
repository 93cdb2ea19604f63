"""Write a tiny model with random weights, for tests of what does not depend on what it says."""

from pathlib import Path
from typing import Any

import pytest


def make_writer(tokenizer: Any, vocab_size: int, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return seed -> the directory of a Qwen3 of one layer, width 64, 1024 positions, with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    made: dict[int, Path] = {}

    def make(seed: int = 0) -> Path:
        if seed not in made:
            directory = tmp_path_factory.mktemp("models") / f"tiny-{seed}"
            config = Qwen3Config(
                vocab_size=vocab_size,
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
