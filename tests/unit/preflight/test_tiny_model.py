"""Test that the model on which an architecture is tried is small, and has what decides how its layers compute."""

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.preflight.tiny_model import VOCAB_SIZE, tiny_model


def tiny(model_type, **settings):
    config = AutoConfig.for_model(model_type, **settings)
    before = config.to_dict()
    model = tiny_model(config, AutoModelForCausalLM.from_config)
    assert config.to_dict() == before
    return model


def test_a_model_of_70_billion_parameters_becomes_one_of_millions():
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    model = tiny("llama", **sizes, num_hidden_layers=80, vocab_size=128256)
    assert model.num_parameters() < 10_000_000
    config = model.config
    assert (config.num_hidden_layers, config.vocab_size, config.hidden_size) == (2, VOCAB_SIZE, 256)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (2, 1, 128)
    assert model.dtype == torch.float32


def test_a_layer_of_each_kind_stays_and_windows_become_short():
    config = tiny("gemma3_text").config  # every sixth layer attends to all tokens
    assert config.layer_types == ["sliding_attention"] * 5 + ["full_attention"]
    assert config.sliding_window == 6


def test_of_a_late_kind_one_layer_stays():
    kinds = ["full_attention"] * 30 + ["sliding_attention"] * 2
    config = tiny("qwen2", num_hidden_layers=32, layer_types=kinds, use_sliding_window=True, sliding_window=4096).config
    assert config.layer_types == ["full_attention", "full_attention", "sliding_attention"]


def test_settings_that_change_what_is_computed_stay():
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    config = tiny("llama", rope_parameters=rope, max_position_embeddings=2048, attention_bias=True).config
    assert (config.rope_parameters, config.max_position_embeddings, config.attention_bias) == (rope, 2048, True)


def test_every_weight_differs_from_what_training_starts_with():
    model = tiny("qwen2")
    norm = model.model.layers[0].input_layernorm.weight
    assert norm.std() > 0.05  # 0.1 around 1
    assert model.model.layers[0].self_attn.q_proj.bias.abs().max() > 0.1  # 0 at first


def test_an_architecture_that_does_not_run_is_an_error_with_its_reason():
    def build(config):
        if torch.empty(0).device.type == "meta":
            return nn.Linear(2, 2)
        raise KeyError("kernels")

    with pytest.raises(ValueError, match=r"^KeyError: 'kernels'$"):
        tiny_model(AutoConfig.for_model("llama"), build)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("qwen2", {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 28}),  # as Qwen2.5-0.5B
        ("qwen2", {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28}),  # Qwen2.5-7B
        ("qwen3", {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "head_dim": 128}),
        ("llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "head_dim": 128}),
    ],
)
def test_with_its_vocabulary_a_model_is_small_enough_for_a_cpu(model_type, sizes):
    config = AutoConfig.for_model(
        model_type, num_key_value_heads=4, num_hidden_layers=28, vocab_size=32064, tie_word_embeddings=False, **sizes
    )
    model = tiny_model(config, AutoModelForCausalLM.from_config, num_kv_heads=2, num_layers=4, keeps_vocabulary=True)
    small = model.config
    assert (small.vocab_size, small.num_hidden_layers, small.tie_word_embeddings) == (32064, 4, False)
    assert (small.num_attention_heads % 2, small.num_key_value_heads % 2, small.intermediate_size % 2) == (0, 0, 0)
    assert small.num_attention_heads > small.num_key_value_heads
    assert (small.hidden_size % 64, small.intermediate_size % 64) == (0, 0), "as an engine's kernels ask for"
    assert model.num_parameters() < 55_000_000, "of which the embedding and the head are nearly all"
