"""Samples packed into a row give the hidden states and gradients that each gives alone under eager attention."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from consumer.packed_attention import MODEL_TYPES, NAME, row_lengths

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_implementation": NAME,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
    "mistral, sliding": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2, sliding": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, **SLIDING)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    "qwen3, sliding": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **SLIDING)),
}
LENGTHS = ((5, 1, 9), (7, 3, 5))  # three samples in the first row; two and padding in the second


def alone(model: PreTrainedModel, token_ids: Tensor) -> Tensor:
    """Each sample as a batch of its own, under eager attention with transformers' masks."""
    model.set_attn_implementation("eager")
    rows = [
        torch.cat(
            [model.base_model(input_ids=part[None], use_cache=False).last_hidden_state[0] for part in row.split(n)]
        )
        for row, n in zip(token_ids, LENGTHS, strict=True)
    ]
    return torch.stack(rows)


@pytest.mark.parametrize("name", MODELS)
def test_packed_samples_are_as_if_alone(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    token_ids = torch.randint(0, 40, (2, 15))
    position_ids = torch.tensor([[t for n in row for t in range(n)] for row in LENGTHS])
    direction = torch.randn(2, 15, 32)
    packed = model.base_model(
        input_ids=token_ids, position_ids=position_ids, use_cache=False, lengths=LENGTHS
    ).last_hidden_state
    (packed * direction).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.base_model.named_parameters()}
    model.zero_grad()
    expected = alone(model, token_ids)
    (expected * direction).sum().backward()
    torch.testing.assert_close(packed, expected, rtol=1e-4, atol=1e-5)
    for parameter_name, p in model.base_model.named_parameters():
        difference = (gradients[parameter_name] - p.grad).norm() / p.grad.norm()
        assert difference < 1e-5, parameter_name


def test_rows_of_one_sample_need_no_lengths() -> None:
    torch.manual_seed(0)
    model = MODELS["qwen3"]().eval()
    token_ids = torch.randint(0, 40, (1, 6))
    whole = model.base_model(input_ids=token_ids, use_cache=False).last_hidden_state
    listed = model.base_model(input_ids=token_ids, use_cache=False, lengths=((6,),)).last_hidden_state
    torch.testing.assert_close(whole, listed)


def test_every_architecture_that_uses_it_is_compared_here() -> None:
    assert {name.split(",")[0] for name in MODELS} == MODEL_TYPES


def lengths_of(positions: list[list[int]], samples: list[list[int]]) -> tuple[tuple[int, ...], ...] | None:
    return row_lengths(np.array(positions), np.array(samples, dtype=np.int32))


def test_lengths_are_read_from_restarting_positions() -> None:
    assert lengths_of([[0, 1, 0, 0, 1, 2], [0, 1, 2, 3, 0, 1]], [[0, 0, 1, 2, 2, 2], [0, 0, 0, 0, -1, -1]]) == (
        (2, 1, 3),
        (4, 2),
    )


def test_padding_does_not_make_a_row_packed() -> None:
    assert lengths_of([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]], [[3, 3, 3, -1, -1], [1, 1, 1, 1, 1]]) is None
    assert lengths_of([[0, 1, 2, 3, 4]], [[-1] * 5]) is None
