"""Test the check of an update against the headers of the engine's checkpoint."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from coati_rl.errors import EngineError, TransferError
from coati_rl.transport.manifest import build_manifest
from producer.engines.checkpoint import check_manifest, find_checkpoint, read_entries

CONFIG = {"model_type": "qwen3", "hidden_size": 4, "num_attention_heads": 1, "num_hidden_layers": 1}


def tensors(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"embed": torch.zeros(3, 4), "norm": torch.zeros(4, dtype=torch.bfloat16), **more}


def save(directory, *, tied: bool, **more: torch.Tensor):
    save_file(tensors(**more), directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    return directory


def test_names_shapes_and_dtypes_come_from_the_headers(tmp_path):
    entries = read_entries(save(tmp_path, tied=False))
    assert {(e.name, e.dtype, e.shape) for e in entries.values()} == {
        ("embed", "float32", (3, 4)),
        ("norm", "bfloat16", (4,)),
    }


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_no_part_of_an_update_even_if_it_was_saved(tmp_path, tied):
    entries = read_entries(save(tmp_path, tied=tied, **{"lm_head.weight": torch.zeros(3, 4)}))
    assert ("lm_head.weight" in entries) is not tied


def test_all_files_of_a_sharded_checkpoint_count(tmp_path):
    save(tmp_path, tied=False).joinpath("model.safetensors").unlink()
    save_file({"embed": torch.zeros(3, 4)}, tmp_path / "model-1.safetensors")
    save_file({"norm": torch.zeros(4)}, tmp_path / "model-2.safetensors")
    save_file({"stray": torch.zeros(1)}, tmp_path / "adapter.safetensors")
    index = {"weight_map": {"embed": "model-1.safetensors", "norm": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(read_entries(tmp_path)) == {"embed", "norm"}


def test_the_trainers_tensors_in_a_checkpoint_of_ours_are_no_part_of_the_model(tmp_path):
    save_file({"exp_avg/embed": torch.zeros(3, 4)}, tmp_path / "optimizer.safetensors")
    assert set(read_entries(save(tmp_path, tied=False))) == {"embed", "norm"}


def test_a_directory_without_safetensors_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"engines read \.safetensors"):
        read_entries(tmp_path)


def test_a_model_that_is_nowhere_is_refused_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(EngineError, match="no/such-model"):
        find_checkpoint("no/such-model")
    with pytest.raises(EngineError, match="absent"):
        find_checkpoint(str(tmp_path / "absent"))


@pytest.fixture
def expected(tmp_path):
    return read_entries(save(tmp_path, tied=False))


def check(named: dict[str, torch.Tensor], expected, *, dtype: str = "float32") -> None:
    check_manifest(build_manifest(named.items(), policy_version=2), expected, dtype=dtype)


def test_the_same_model_passes_in_any_order_and_in_either_dtype(expected):
    as_float, as_half = (
        {name: cast(tensor) for name, tensor in tensors().items()} for cast in (Tensor.float, Tensor.half)
    )
    assert check(tensors(), expected) is None
    assert check(dict(reversed(tensors().items())), expected) is None
    assert check(as_float, expected) is None
    assert check(as_half, expected, dtype="float16") is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm": None}, "version 2 is refused: norm is missing"),
        ({"extra": torch.zeros(1)}, "extra is unknown"),
        ({"norm": torch.zeros(5)}, r"norm has shape \(5,\), the model's has \(4,\)"),
        ({"norm": torch.zeros(4).half()}, "norm is float16, the engine computes in float32"),
        ({f"extra{i}": torch.zeros(1) for i in range(5)}, "extra2 is unknown and 2 more"),
    ],
)
def test_any_difference_is_refused_by_name(expected, change, message):
    changed = {name: tensor for name, tensor in {**tensors(), **change}.items() if tensor is not None}
    with pytest.raises(TransferError, match=message):
        check(changed, expected)
