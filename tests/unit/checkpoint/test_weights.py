"""Test identities of weights: what changes them and what does not, and what `coati-rl weights` says of two."""

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coati_rl.checkpoint.directory import write_manifest, write_state
from coati_rl.checkpoint.saved_adapter import check_base, check_saved_adapter, recorded_base, recorded_weights
from coati_rl.checkpoint.weights_command import main
from coati_rl.config.cli import parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.errors import ConfigError
from coati_rl.model_files.identity import model_identity
from tests.adapter_dirs import save_adapter

HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"
Change = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


@pytest.fixture
def changed(model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with changed tensors."""

    def make(change: Change, name: str = "copy") -> Path:
        directory = tmp_path / name
        shutil.copytree(model_dir, directory)
        tensors = change(load_file(directory / "model.safetensors"))
        save_file({key: each.contiguous() for key, each in tensors.items()}, directory / "model.safetensors", {})
        return directory

    return make


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Run the command with --json."""

    def run(*arguments: object) -> dict[str, Any]:
        assert main([*map(str, arguments), "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        return found

    return run


@pytest.fixture
def adapter(model_dir: Path, tmp_path: Path) -> Path:
    save_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(model_dir))
    return tmp_path / "adapter"


def test_files_their_order_and_a_stored_tied_head_do_not_change_it(model_dir, changed, tmp_path) -> None:
    own = model_identity(model_dir)
    assert model_identity(changed(lambda tensors: dict(reversed(tensors.items())), "reversed")) == own
    assert model_identity(changed(lambda tensors: tensors | {HEAD: tensors[EMBEDDING].clone()}, "with head")) == own
    AutoModelForCausalLM.from_pretrained(model_dir).save_pretrained(tmp_path / "cut", max_shard_size="50KB")
    assert len([*(tmp_path / "cut").glob("*.safetensors")]) > 1
    assert model_identity(tmp_path / "cut") == own


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {NORM: tensors[NORM].nextafter(torch.tensor(9.0))},
        lambda tensors: tensors | {NORM: tensors[NORM].bfloat16()},
        lambda tensors: tensors | {NORM: tensors[NORM][None]},
        lambda tensors: {("other" if name == NORM else name): each for name, each in tensors.items()},
        lambda tensors: tensors | {HEAD: tensors[EMBEDDING] * 2},
    ],
    ids=["a bit", "dtype", "shape", "name", "own head"],
)
def test_a_bit_a_dtype_a_shape_a_name_and_another_head_change_it(model_dir, changed, change) -> None:
    assert model_identity(changed(change)) != model_identity(model_dir)


def test_a_changed_file_is_read_again(changed) -> None:
    directory = changed(lambda tensors: tensors)
    before = model_identity(directory)
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {NORM: tensors[NORM] + 1}, directory / "model.safetensors", {})
    assert model_identity(directory) != before


def test_an_adapter_s_is_of_its_base_its_scale_and_its_tensors(told, model_dir, changed, adapter, tmp_path) -> None:
    first = told(adapter)
    assert first["base"] == {"identity": model_identity(model_dir), "directory": str(model_dir)}
    assert (first["kind"], first["rank"], first["scale"], first["is_zero"]) == ("adapter", 4, 2.0, False)
    other = changed(lambda tensors: tensors | {NORM: tensors[NORM] + 1})
    assert told(adapter, "--base", other)["identity"] != first["identity"]
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace('"lora_alpha": 8', '"lora_alpha": 8.000001'))
    assert told(adapter)["identity"] != first["identity"]
    path.write_text(path.read_text().replace('"lora_alpha": 8.000001', '"lora_alpha": 8'))
    assert told(adapter)["identity"] == first["identity"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        tensors | {name: each * 2 for name, each in [*tensors.items()][:1]}, adapter / "adapter_model.safetensors"
    )
    assert told(adapter)["identity"] != first["identity"]


def test_two_models_are_compared_tensor_by_tensor(told, model_dir, changed) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = [name for name in tensors if "layers.0.mlp" in name]
        rest = {name: each for name, each in tensors.items() if name != names[0]}
        return rest | {"new": torch.ones(1), NORM: tensors[NORM] + 0.5, names[1]: tensors[names[1]][:3]}

    found = told(changed(change), model_dir)
    compared = found["tensors_compared"]
    missing, reshaped = sorted(name for name in load_file(model_dir / "model.safetensors") if "layers.0.mlp" in name)[
        :2
    ]
    assert found["relation"] == "different weights"
    assert compared["missing"] == [missing] and compared["unknown"] == ["new"]
    assert [*compared["shapes"]] == [reshaped] and compared["dtypes"] == {}
    assert compared["largest_difference"] == {NORM: 0.5}
    assert compared["equal"] == found["other"]["tensors"] - 3


def test_the_base_itself_is_told_from_what_was_trained_on_it(told, model_dir, adapter, tmp_path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model_dir, copy)
    assert told(copy, model_dir)["relation"] == "the same weights"
    assert told(copy, adapter)["relation"] == "the second is an adapter of the other, which is the base itself"
    save_adapter(tmp_path / "zero", AutoModelForCausalLM.from_pretrained(model_dir), std=0)
    zero = told(tmp_path / "zero", model_dir)
    assert zero["is_zero"] and zero["relation"].endswith("the base itself; it changes nothing")
    assert told(adapter, tmp_path / "zero")["relation"] == "different adapters of the same base"


def test_a_checkpoint_says_its_base_where_the_base_is_not_here(told, capsys, model_dir, adapter) -> None:
    identity = told(adapter)["identity"]
    path = adapter / "adapter_config.json"
    path.write_text(path.read_text().replace(str(model_dir), "/not/here"))
    assert main([str(adapter)]) == 2
    assert "its base '/not/here' is not here; give the base's directory with --base" in capsys.readouterr().err
    weights = recorded_weights(adapter, model_identity(model_dir))
    assert weights == {"base": model_identity(model_dir), "identity": identity}
    write_state(adapter, {"weights": weights})
    assert recorded_base(adapter) == weights["base"]
    assert told(adapter)["identity"] == identity


def test_an_adapter_of_another_base_is_refused(model_dir, changed, adapter, capsys) -> None:
    write_state(adapter, {"weights": recorded_weights(adapter, model_identity(model_dir))})
    check_base(adapter, model_dir, "ADAPTER")
    other = changed(lambda tensors: tensors | {NORM: tensors[NORM] + 1})
    with pytest.raises(ConfigError, match="ADAPTER: is an adapter of another base, whose weights are"):
        check_base(adapter, other, "ADAPTER")
    assert main([str(adapter), "--base", str(other)]) == 2
    assert "another base" in capsys.readouterr().err


def test_a_run_goes_on_from_adapters_of_its_own_base_alone(model_dir, changed, adapter, tmp_path) -> None:
    write_state(adapter, {"weights": recorded_weights(adapter, model_identity(model_dir))})
    other = changed(lambda tensors: tensors | {NORM: tensors[NORM] + 1})
    for model in (model_dir, other):
        flags = ["-m", str(model), "-d", str(tmp_path), "--lora-rank", "4"]
        config, _ = parse_job(flags, OFFLINE["sft"])
        with nullcontext() if model is model_dir else pytest.raises(ConfigError, match=f"another base.*{other}"):
            check_saved_adapter(config, adapter)


def test_a_run_stands_for_its_newest_checkpoint_and_a_path_without_weights_is_refused(
    told, capsys, model_dir, tmp_path
) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step-3"
    shutil.copytree(model_dir, checkpoint)
    write_state(checkpoint, {})
    write_manifest(checkpoint)
    assert told(tmp_path / "run") == {**told(checkpoint), "path": str(tmp_path / "run")}
    for path, message in ((tmp_path, "holds no model, adapter or complete checkpoint"), (tmp_path / "none", "no such")):
        assert main([str(path)]) == 2
        assert message in capsys.readouterr().err


def test_the_text_has_an_identity_a_line_and_the_largest_differences_first(model_dir, changed, capsys) -> None:
    names = [name for name in load_file(model_dir / "model.safetensors") if "norm" in name][:2]
    other = changed(lambda tensors: tensors | {names[0]: tensors[names[0]] + 1, names[1]: tensors[names[1]] + 2})
    assert main([str(other), str(model_dir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == [model_identity(other), model_identity(model_dir)]
    assert lines[2] == "different weights"
    assert lines[-3:] == ["largest differences: 2", f"  {names[1]}: 2", f"  {names[0]}: 1"]
