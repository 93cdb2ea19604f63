"""Save the random Qwen3 that the measurements of training are taken with."""

from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def save_random_model(
    directory: Path,
    *,
    vocab: int,
    hidden: int,
    layers: int,
    max_positions: int,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Save a model with heads of 32, two queries a key, and an intermediate size of four times `hidden`."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 32),
        num_key_value_heads=max(2, hidden // 64),
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(directory)
