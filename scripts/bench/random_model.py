"""Save the random Qwen3 that the measurements of training are taken with."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig


def save_random_model(
    directory: Path,
    *,
    vocab: int,
    hidden: int,
    layers: int,
    max_positions: int,
    tied: bool = True,
    num_experts: int = 0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Save a model with heads of 32, two queries a key, and an intermediate size of four times `hidden`.

    With `num_experts` each layer has as many in place of its MLP, of this size each, and a token passes two of them.
    """
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": 4 * hidden}
    config = (Qwen3MoeConfig if num_experts else Qwen3Config)(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(2, hidden // 32),
        num_key_value_heads=max(2, hidden // 64),
        head_dim=32,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tied,
        **(experts if num_experts else {}),
    )
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(directory)
