"""Test that a bfloat16 model computes in float32 without a copy of it, and is as before afterwards."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.batching.packing import probe_micro_batch
from consumer.backend import Backend
from consumer.models.float32_compute import Float32Compute
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1}
MORE = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    "gemma3_text": {"head_dim": 8, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "falcon_h1": {"head_dim": 8, "num_key_value_heads": 2, **MAMBA},
}


def test_a_backend_scores_its_bfloat16_weights_in_float32(model_dir: Path) -> None:
    backend = Backend(backend_config(model_dir, precision="bf16"), SingleProcess(device=torch.device("cpu")))
    probe = probe_micro_batch(range(40))
    before = backend.score([probe])[0]
    found = backend.score_float32([probe])[0]
    exact = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).float()
    ids = torch.arange(40)
    right = torch.log_softmax(exact(ids[None]).logits[0, :-1], dim=-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(found[0], right.detach(), rtol=0, atol=2e-6)
    assert (before[0] - right).abs().mean() > 1e-4
    assert torch.equal(backend.score([probe])[0], before)
    assert {parameter.dtype for parameter in backend.policy.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["llama", *MORE])
def test_other_architectures_compute_as_their_copies_in_float32(name: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SIZES, **MORE.get(name, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    ids = torch.arange(40)[None]
    with torch.no_grad(), Float32Compute():
        found = model(ids).logits
    with torch.no_grad():
        coarse = model(ids).logits.float()
        right = model.float()(ids).logits
    assert found.dtype == torch.float32
    assert (found - right).abs().mean() < 0.05 * (coarse - right).abs().mean()  # 0, but for experts' own casts
