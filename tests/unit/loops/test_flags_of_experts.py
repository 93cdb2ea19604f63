"""Test that fields for mixtures of experts reach the trainers (see test_flags.py)."""

import shutil

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from coati_rl.errors import ConfigError
from consumer.proofs.model import try_model

METRICS = {"router_load_max", "router_idle_experts", "router_entropy_mean", "aux_loss"}


@pytest.fixture(scope="module")
def expert_dir(make_model_dir, tokenizer, tmp_path_factory):
    """A Qwen3-MoE of one layer and four experts, with the tokenizer of the dense model."""
    directory = tmp_path_factory.mktemp("experts") / "model"
    shutil.copytree(make_model_dir(), directory, ignore=lambda *_: {"model.safetensors", "config.json"})
    config = Qwen3MoeConfig(
        vocab_size=272,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return str(directory)


def test_aux_loss_coeff__adds_the_gradient_of_balance_to_a_mixture_of_experts(run_in_threads, expert_dir):
    without, balanced = (
        run_in_threads({"model": expert_dir, "aux_loss_coeff": coeff, "max_steps": 1}) for coeff in (0.0, 1.0)
    )
    router = "model.layers.0.mlp.gate.weight"
    change = (balanced.gradients[0][router] - without.gradients[0][router]).norm()
    assert change > 0.1 * without.gradients[0][router].norm()
    assert {name: without.steps[0][name] for name in METRICS} == {name: balanced.steps[0][name] for name in METRICS}
    assert balanced.steps[0]["aux_loss"] >= 0.9
    assert balanced.steps[0]["router_load_max"] >= 1.0


def test_aux_loss_coeff__of_a_dense_model_is_refused(config_with, make_model_dir):
    config = config_with(aux_loss_coeff=0.1)
    with pytest.raises(
        ConfigError, match=r"^--aux-loss-coeff 0\.1: --model .* is a qwen3; its loss is that of the rou"
    ):
        try_model(config, make_model_dir(), flag="--model")
