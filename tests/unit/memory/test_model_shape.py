"""Test the counts of parameters, against real models, whole and cut."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.checkpoint.resumed_run import check_shape
from coati_rl.config.cli import build_config
from coati_rl.errors import ConfigError
from coati_rl.memory.engine import EngineSettings, token_bytes
from coati_rl.memory.model_shape import model_shape
from coati_rl.model_files.config import setting
from consumer.parallel.layout_rules import check_layout

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "mistral", "gpt2"])
def test_parameters_are_counted_as_a_real_model_has_them(model_type, tied):
    config = AutoConfig.for_model(model_type, **SIZES, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    shape = model_shape(config)
    assert shape.num_weights == sum(parameter.numel() for parameter in model.parameters())
    assert shape.is_tied == tied
    assert shape.largest_tensor == max(parameter.numel() for parameter in model.parameters())
    assert shape.is_known == (model_type != "gpt2")


def test_a_tensor_parallel_rank_holds_half_of_the_matrices_and_of_the_vocabulary_and_all_norms():
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True)
    whole, half = model_shape(config), model_shape(config, tensor_parallel_size=2)
    norms = 2 * 64
    assert half.layer_weights == (whole.layer_weights - norms) // 2 + norms
    assert half.embedding_weights == 48 * 64 and half.other_root_weights == 64
    assert (half.queries, half.keys, half.intermediate, half.vocabulary) == (32, 16, 80, 48)


def test_an_engine_shares_also_what_the_plan_of_the_trainers_leaves_whole():
    config = AutoConfig.for_model("phi3", **SIZES, tie_word_embeddings=True, pad_token_id=0)
    whole, planned, engine = (
        model_shape(config, tensor_parallel_size=size, cuts_all=cuts_all)
        for size, cuts_all in ((1, False), (2, False), (2, True))
    )
    norms = 2 * 64
    assert engine.layer_weights == (whole.layer_weights - norms) // 2 + norms < planned.layer_weights


def test_a_scalar_head_takes_the_place_of_the_vocabulary():
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=False)
    language, scalar = model_shape(config), model_shape(config, has_scalar_head=True)
    assert language.num_weights - scalar.num_weights == 95 * 64
    assert scalar.vocabulary == 1 and not scalar.is_tied


@pytest.mark.parametrize("model_type", ["qwen3", "deepseek_v2"])
def test_keys_and_values_are_those_that_a_real_cache_keeps(model_type):
    of_latent = {"kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    dense = {"first_k_dense_replace": 2}
    heads = {**of_latent, **dense, "num_key_value_heads": 4} if model_type == "deepseek_v2" else {}
    config = AutoConfig.for_model(model_type, **{**SIZES, **heads})
    with torch.no_grad():
        layers = AutoModelForCausalLM.from_config(config)(torch.ones(1, 5, dtype=torch.long)).past_key_values.layers
    kept = sum(each.numel() * each.element_size() for layer in layers for each in (layer.keys, layer.values))
    settings = EngineSettings(precision="fp32", tensor_parallel_size=1, max_model_len=8, max_num_seqs=1, block_size=16)
    assert token_bytes(config, settings) * 5 == kept


@pytest.mark.full
def test_models_whose_layers_differ_are_counted_with_their_largest_heads_and_mlps():
    gemma4, gemma3n = (AutoConfig.for_model(name) for name in ("gemma4_text", "gemma3n_text"))
    assert {each.head_dim for each in gemma4.per_layer_config} == {256, 512}
    shape = model_shape(gemma4)
    assert (shape.queries, shape.keys, shape.intermediate) == (8 * 512, 4 * 512, 9216)
    assert setting(gemma4, "head_dim")[:6] == [256] * 5 + [512] and setting(gemma4, "hidden_size") == 2304
    settings = EngineSettings(precision="bf16", tensor_parallel_size=1, max_model_len=8, max_num_seqs=1, block_size=16)
    assert token_bytes(gemma4, settings) == 2 * 30 * 4 * 512 * 2
    assert model_shape(gemma3n).intermediate == 16384
    assert model_shape(AutoConfig.for_model("gpt_neo")).intermediate == 4 * 2048, "its config says None"


@pytest.mark.parametrize("name", ["gemma4_text", "llama"])
def test_a_layout_and_a_resumed_run_read_the_sizes_of_models_whose_layers_differ(name, tmp_path):
    config = AutoConfig.for_model(name)
    config.save_pretrained(tmp_path)
    layout = build_config({"model": str(tmp_path), "dataset": "d", "num_trainers": 1})
    check_layout(layout, config)
    check_shape(layout, tmp_path)
    with pytest.raises(ConfigError, match="-tp 3"):
        check_layout(layout.with_changes(tensor_parallel_size=3, num_trainers=3), config)
