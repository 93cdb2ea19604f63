"""Test that architectures are proved to compute samples apart, get rows of one sample, or are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from coati_rl.errors import ConfigError
from consumer.models import packed_attention
from consumer.proofs import samples as proof
from consumer.proofs.samples import packed_difference

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
HYBRID = {
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64},
    "biogpt": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {**MIXED, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_chunk_size": 8},
}
ALTERED = {
    "gemma2": ({}, "final_logit_softcapping 30.0"),
    "cohere": ({}, "logit_scale 0.0625"),
    "granite": ({"logits_scaling": 2.0}, "logits_scaling 2.0"),
    "falcon_h1": ({**HYBRID["falcon_h1"], "lm_head_multiplier": 3.0}, "lm_head_multiplier 3.0"),
    "recurrent_gemma": ({"lru_width": 32}, "logits_soft_cap 30.0"),
    "modernbert-decoder": ({}, "nats from those of the model's own logits"),
}
RENAMED = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "gpt_neox": {},
}
LATENT = {
    "num_attention_heads": 4,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
RENAMED["deepseek_v2"] = LATENT
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}


@pytest.fixture
def difference(tmp_path: Path) -> Callable[..., float]:
    def run(model_type: str, *, max_tokens: int = 128, has_scalar_head: bool = False, **settings: Any) -> float:
        AutoConfig.for_model(model_type, **{**SIZES, **settings}).save_pretrained(tmp_path)
        return packed_difference(tmp_path, name="--model m", max_tokens=max_tokens, has_scalar_head=has_scalar_head)

    return run


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text", "phi3", "olmo2"])
def test_an_architecture_whose_attention_goes_by_positions_packs(difference, model_type):
    assert difference(model_type) == 0.0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("model_type", HYBRID)
def test_state_and_masks_that_run_on_across_samples_are_found(difference, model_type):
    assert difference(model_type, **HYBRID[model_type]) > 0.1


@pytest.mark.sampled(6)
@pytest.mark.parametrize("model_type", ALTERED)
def test_logits_that_are_not_the_head_s_plain_output_are_refused_by_name(difference, model_type):
    settings, named = ALTERED[model_type]
    with pytest.raises(ConfigError):
        difference(model_type, **settings)
    with pytest.raises(ConfigError) as caught:  # each time
        difference(model_type, **settings)
    assert str(caught.value).startswith(f"--model m ({model_type}): log-probabilities of the LM head's plain output")
    assert named in str(caught.value)


def test_a_reward_model_s_score_does_not_depend_on_how_logits_are_changed(difference):
    assert difference("gemma2", has_scalar_head=True) == 0.0
    assert difference("qwen2", has_scalar_head=True) == 0.0


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model_type", "rope", "limit"), [("llama", DYNAMIC, 64), ("qwen2", DYNAMIC, 64), ("llama", LONG, 256)]
)
def test_frequencies_that_depend_on_the_longest_sample_are_refused_beyond_the_original_length(
    difference, model_type, rope, limit
):
    settings = {"rope_parameters": rope, "max_position_embeddings": limit}
    assert difference(model_type, max_tokens=64, **settings) == 0.0
    with pytest.raises(ConfigError, match=r"200 tokens beside a short sample .* use samples of at most 64 tokens$"):
        difference(model_type, max_tokens=200, **settings)


@pytest.mark.parametrize("rope", [{**DYNAMIC, "rope_type": "linear"}, {**LONG, "rope_type": "yarn", "factor": 4.0}])
def test_fixed_frequencies_hold_at_every_length(difference, rope):
    assert difference("llama", max_tokens=200, rope_parameters=rope) == 0.0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("model_type", RENAMED)
def test_weights_that_are_joined_or_renamed_as_they_are_loaded_are_taken(difference, model_type):
    assert difference(model_type, **RENAMED[model_type]) == 0.0


def test_numbers_in_checkpoints_that_are_no_parameters_are_refused(difference):
    named = r"model\.layers\.\d\.mlp\.gate\.e_score_correction_bias"
    with pytest.raises(ConfigError, match=rf"--model m \(deepseek_v3\): its checkpoints hold {named}, "):
        difference("deepseek_v3", **{**LATENT, "n_group": 1, "topk_group": 1})


def test_tensors_that_are_computed_from_parameters_are_refused(difference, monkeypatch):
    """As where rotary halves are permuted: then a tensor of the checkpoint is no part of a parameter."""

    def reverted(model, own):
        return {name: own[name][::2].repeat(2, 1) if "q_proj" in name else own[name] for name in own}

    monkeypatch.setattr("transformers.core_model_loading.revert_weight_conversion", reverted)
    with pytest.raises(ConfigError, match=r"computes model\.layers\.0\.self_attn\.q_proj\.weight from other tensors"):
        difference("qwen3", intermediate_size=40)  # a config that no other test has tried


def test_an_architecture_without_this_attention_is_refused(difference):
    with pytest.raises(
        ConfigError, match=r"\(bloom\): transformers cannot run this architecture as the trainers need it"
    ):
        difference("bloom")


def test_a_mask_that_lets_samples_see_each_other_is_found(difference, monkeypatch):
    monkeypatch.setattr("consumer.models.policy_model.row_lengths", lambda segments, shape: None)
    assert difference("llama", max_tokens=127) > 0.1


def test_a_leak_of_a_hundredth_of_a_nat_is_found(difference, monkeypatch):
    forward = proof.policy_forward

    def leaky(model, inputs, **options):
        values, sums = forward(model, inputs, **options)
        return values + (0.01 if inputs.lengths is not None and inputs.parents is None else 0.0), sums

    monkeypatch.setattr(proof, "policy_forward", leaky)
    assert difference("llama", max_tokens=126) == pytest.approx(0.01, rel=1e-2)


def test_a_prefix_that_is_computed_wrong_is_found(difference, monkeypatch):
    forward = proof.policy_forward

    def without_parents(model, inputs, **options):
        values, sums = forward(model, inputs, **options)
        return values + (0.01 if inputs.parents is not None else 0.0), sums

    monkeypatch.setattr(proof, "policy_forward", without_parents)
    assert difference("qwen3", max_tokens=125) == pytest.approx(0.01, rel=1e-2)


def test_a_number_that_is_not_one_is_a_difference(difference, monkeypatch):
    def nan(model, inputs, **options) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.full(inputs.loss_arrays["sources"].shape, torch.nan), {}

    monkeypatch.setattr(proof, "policy_forward", nan)
    with pytest.raises(ConfigError, match="differ by nan nats"):
        difference("llama", max_tokens=124)


def test_a_proof_that_could_not_see_a_leak_is_none(difference, monkeypatch):
    plain = proof.plain_values
    short = proof._LENGTHS[-1] - 1  # as if no token of the last sample depended on those before it

    def blind(model, token_ids):
        return plain(model, token_ids if len(token_ids) < 30 else token_ids[-short - 1 :])

    monkeypatch.setattr(proof, "plain_values", blind)
    assert difference("llama", max_tokens=122) == pytest.approx(1e-4)


def test_a_model_is_tried_once_for_each_config_and_length(difference, monkeypatch):
    assert difference("llama", max_tokens=123) == 0.0
    monkeypatch.setattr(proof, "tiny_model", lambda *_, **__: pytest.fail("tried again"))
    assert difference("llama", max_tokens=123) == 0.0


def test_what_the_trainers_attention_computes_is_what_is_tried(tmp_path):
    for model_type in sorted(packed_attention.MODEL_TYPES):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES}))
        model = proof.tried_model(tmp_path, "--model m", has_scalar_head=False)
        assert model.config._attn_implementation == packed_attention.NAME
