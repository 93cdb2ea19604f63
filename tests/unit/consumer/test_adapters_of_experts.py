"""Test which layers of mixtures of experts take adapters, and that a warning names those that PEFT misreads."""

from typing import Any

import pytest
from transformers import AutoConfig

from coati_rl.config.cli import build_job
from coati_rl.config.commands import OFFLINE
from coati_rl.errors import ConfigError
from coati_rl.preflight.adapter import adapter_warnings
from consumer.adapters.check import check_adapters


def job(**settings: Any) -> Any:
    return build_job({"model": "m", "dataset": "d", **settings}, OFFLINE["sft"])


def mixture(dense_layers: list[int], model_type: str = "qwen3_moe") -> Any:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_experts": 4}
    return AutoConfig.for_model(model_type, **sizes, mlp_only_layers=dense_layers)


def test_adapters_of_dense_layers_that_peft_takes_for_those_of_experts_are_warned_of() -> None:
    config = job(lora_rank=4)
    (warning,) = adapter_warnings(config, mixture([1]))
    assert warning == (
        "--lora-targets all-linear: PEFT takes down_proj, gate_proj, up_proj of a qwen3_moe for layers of its experts, "
        "and does not read such adapters, which coati-rl merge does; without them it does: --lora-targets "
        "k_proj,o_proj,q_proj,v_proj"
    )
    attention = job(lora_rank=4, lora_targets=("q_proj", "v_proj"))
    whole = job()
    others = [
        (attention, mixture([1])),
        (whole, mixture([1])),
        (config, mixture([])),
        (config, mixture([], "qwen2_moe")),
    ]
    assert [adapter_warnings(*each) for each in others] == [[]] * 4


@pytest.mark.parametrize("target", ["gate_proj", "experts", "gate"])
def test_experts_and_routers_take_no_adapter(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"--lora-targets {target}: no linear layer of Qwen3MoeForCausalLM that"):
        check_adapters(job(lora_rank=4, lora_targets=(target,)), mixture([]))
