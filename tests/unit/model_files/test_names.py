"""Test that what transformers saves, in its own files' names, has all that it loads, and what is left out is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from coati_rl.errors import ConfigError
from coati_rl.model_files.check import check_model_files
from coati_rl.model_files.quiet import no_progress_bars

SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GQA = {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2}),
        ("opt", {"ffn_dim": 16, "word_embed_proj_dim": 16}),
        ("gpt_neox", {"intermediate_size": 24}),
        ("apertus", GQA),  # scalar buffers that are saved
        ("mixtral", {**GQA, "num_local_experts": 4}),  # experts are stacked as they are loaded
    ],
)
def test_names_that_transformers_changes_as_it_loads_are_known(tmp_path: Path, model_type: str, settings) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**SIZES, **settings}))
    with no_progress_bars():
        model.save_pretrained(tmp_path)
    assert not check_model_files(tmp_path, "trained").has_own_head
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    left_out = next(name for name, each in sorted(tensors.items()) if each.dim() == 2 and "1" in name)
    save_file({name: each for name, each in tensors.items() if name != left_out}, file, {"format": "pt"})
    with pytest.raises(ConfigError) as caught:
        check_model_files(tmp_path, "trained")
    stacked = {"model.layers.0.block_sparse_moe.experts.0.w1.weight": "model.layers.0.mlp.experts.gate_up_proj"}
    assert stacked.get(left_out, left_out) in str(caught.value)


def test_a_model_with_its_base_models_names_and_masks_of_old_versions_is_taken(tmp_path: Path) -> None:
    config = AutoConfig.for_model("gpt2", vocab_size=40, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    with no_progress_bars():
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): each for name, each in load_file(file).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 32, 32).tril() for layer in (0, 1)}
    masks |= {f"h.{layer}.attn.masked_bias": torch.tensor(-1e4) for layer in (0, 1)}
    save_file(tensors | masks, file, {"format": "pt"})
    assert check_model_files(tmp_path, "trained").warnings == ()


def test_a_checkpoint_in_fp8_is_taken_by_trainers_and_not_by_engines_that_get_updates(
    model_dir, tmp_path: Path
) -> None:
    for path in model_dir.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    file, stored = tmp_path / "model.safetensors", {}
    for name, each in load_file(model_dir / "model.safetensors").items():
        is_matrix = each.dim() == 2 and "layers" in name
        stored[name] = each.to(torch.float8_e4m3fn) if is_matrix else each
        if is_matrix:
            blocks = [-(-size // 128) for size in each.shape]
            stored[name.replace(".weight", ".weight_scale_inv")] = torch.ones(blocks)
    save_file(stored, file, {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": fp8}))
    assert check_model_files(tmp_path, "trained").warnings == ()
    with pytest.raises(ConfigError, match="quant_method fp8, and engines take updates of plain weights"):
        check_model_files(tmp_path, "trained", "sampled")
    with pytest.raises(ConfigError, match=r"model\.safetensors: model\.layers\.0\.\S+ is float8_e4m3fn"):
        check_model_files(tmp_path, "sampled")
