"""Test that weights are named by their content, whatever files they are in."""

import json
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from coati_rl.model_files.identity import model_identity, weights_identity

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.5], dtype=torch.bfloat16)}


def identity(directory: Path, tensors: dict[str, torch.Tensor]) -> str:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    return model_identity(directory)


def test_it_is_the_digest_of_sorted_lines_of_name_dtype_shape_and_content(tmp_path):
    a, b = (xxhash.xxh3_128_hexdigest(content) for content in (TENSORS["a"].numpy().tobytes(), b"\xc0\x3f"))
    lines = f"a torch.float32 [2, 3] {a}\nb torch.bfloat16 [1] {b}\n"
    assert identity(tmp_path / "m", TENSORS) == xxhash.xxh3_128_hexdigest(lines.encode())


def test_files_and_their_order_do_not_matter(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    names = {"b": "model-1.safetensors", "a": "model-2.safetensors"}
    for name, file in names.items():
        save_file({name: TENSORS[name]}, parts / file)
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert model_identity(parts) == identity(tmp_path / "whole", TENSORS)


@pytest.mark.parametrize(
    "change",
    [
        {"a": TENSORS["a"].view(3, 2)},
        {"a": TENSORS["a"].to(torch.float64)},
        {"a": TENSORS["a"] + torch.eye(2, 3) * 1e-6},
        {"c": TENSORS["a"].clone()},
    ],
)
def test_another_shape_dtype_number_or_name_is_another_model(tmp_path, change):
    assert identity(tmp_path / "one", TENSORS) != identity(tmp_path / "other", TENSORS | change)


def test_a_version_is_named_by_all_its_weights_or_by_base_and_adapters():
    assert weights_identity("", "d1") == "d1"
    assert weights_identity("b0", "d1") == xxhash.xxh3_128_hexdigest(b"b0 d1")
    assert len({weights_identity(base, digest) for base in ("b0", "b1") for digest in ("d0", "d1")}) == 4
