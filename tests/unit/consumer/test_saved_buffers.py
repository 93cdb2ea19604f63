"""Test models whose files hold more than parameters, or name them otherwise, as language models within others do."""

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from coati_rl.model_files.check import check_model_files
from consumer.adapters.merge import merge_adapter
from consumer.backend import Backend
from consumer.parallel.single_process import SingleProcess
from tests.adapter_dirs import save_adapter
from tests.backends import backend_config
from tests.unit.consumer.conftest import make_model

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
GEMMA_4 = {
    **SIZES, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "global_head_dim": 16,
    "num_kv_shared_layers": 0, "enable_moe_block": False,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip

GEMMA_3 = {
    "text_config": {**SIZES, "vocab_size": 300}, "vision_config": VISION, "mm_tokens_per_image": 4,
    "image_token_index": 290, "boi_token_index": 291, "eoi_token_index": 292,
}  # fmt: skip

QWEN_3_5 = {
    "text_config": {
        **SIZES, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
        "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "vision_config": {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32},
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
}  # fmt: skip


def saved(directory: Path, config: AutoConfig) -> PreTrainedModel:
    """A model of these settings, in a directory, each buffer of whose files differs from what it starts with."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if name not in names:
            value.mul_(0.5)
    model.save_pretrained(directory)
    return model


def logprobs(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(5, 25)[None]).logits.log_softmax(-1)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gemma4_text", GEMMA_4),
        ("gemma3", GEMMA_3),
        pytest.param(
            "apertus",
            {name: value for name, value in SIZES.items() if name not in ("head_dim", "layer_types")},
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_checkpoint_has_all_that_the_model_s_files_have_and_can_be_trained_on(
    tmp_path: Path, model_type: str, settings: dict
) -> None:
    model = saved(tmp_path / "model", AutoConfig.for_model(model_type, **settings))
    Backend(backend_config(tmp_path / "model"), SingleProcess(device=torch.device("cpu"))).save(
        tmp_path / "step-1", state={}
    )
    index = json.loads((tmp_path / "step-1" / "model.safetensors.index.json").read_text())
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    buffers = model.state_dict().keys() - parameters
    assert buffers <= index["weight_map"].keys() and bool(buffers) is (model_type != "gemma3")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "step-1", dtype=torch.float32).eval()
    assert torch.equal(logprobs(found), logprobs(model))
    Backend(backend_config(tmp_path / "step-1"), SingleProcess(device=torch.device("cpu")))


def names(directory: Path) -> set[str]:
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {*file.keys()}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("model_type", "settings", "targets"),
    [
        ("gemma3", GEMMA_3, "all-linear"),
        ("gemma3", GEMMA_3, ["down_proj", "lm_head"]),
        ("qwen3_5", QWEN_3_5, ["q_proj", "down_proj"]),  # of which transformers makes the language model alone
    ],
    ids=["gemma", "gemma-head", "qwen"],
)
def test_an_adapter_of_a_language_model_within_another_is_merged_under_the_names_of_its_files(
    tmp_path: Path, model_type: str, settings: dict, targets: str | list[str]
) -> None:
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    AutoModelForImageTextToText.from_config(config).save_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    told = "\n".join(check_model_files(base, "trained").warnings)
    assert ("Qwen3_5ForCausalLM leaves out model.visual." in told) is (model_type == "qwen3_5"), told
    save_adapter(adapter, model, target_modules=targets)
    right = logprobs(PeftModel.from_pretrained(model, adapter).eval())
    merge_adapter(base, adapter, out, where="ADAPTER")
    torch.testing.assert_close(logprobs(AutoModelForCausalLM.from_pretrained(out).eval()), right, rtol=0, atol=1e-5)
    assert names(out) == names(base) | ({"lm_head.weight"} if "lm_head" in targets else set())
    assert any("vis" in name for name in names(out))


@pytest.mark.full
def test_joined_experts_are_rounded_by_a_merge_as_other_weights(tmp_path: Path) -> None:
    model = make_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, mlp_only_layers=[])
    for parameter in model.parameters():
        parameter.data.mul_(5)  # so that rounding changes outputs by more than 1e-4
    model.save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", model, target_modules=["q_proj", "v_proj"])
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    assert merge_adapter(base, adapter, tmp_path / "out", dtype=torch.bfloat16, where="ADAPTER").proof.is_rounded
