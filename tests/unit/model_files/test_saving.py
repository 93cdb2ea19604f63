"""Test that a model's settings are written back as they were where transformers refuses to write them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from coati_rl.errors import RunError
from coati_rl.model_files.check import check_model_files
from coati_rl.model_files.saving import write_settings
from consumer.checkpoint import CheckpointReader, CheckpointWriter
from consumer.models.policy_model import load_policy
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import describe_parameters

GENERATION = "generation_config.json"


@pytest.fixture
def model_with(model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with another generation_config.json."""

    def make(**settings: object) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(model_dir, directory)
        (directory / GENERATION).write_text(json.dumps(settings))
        return directory

    return make


def save(model_dir: Path, directory: Path) -> CheckpointWriter:
    """Write a checkpoint of a model as a trainer does, with one optimizer tensor a weight."""
    model = load_policy(model_dir, dtype=torch.float32)
    writer = CheckpointWriter(directory, describe_parameters(model, Layout(), [1]), dtype=torch.float32)
    writer.begin()
    weights = dict(model.named_parameters())
    writer.write(0, weights, {f"exp_avg/{name}": weight / 2 for name, weight in weights.items()})
    writer.publish(model=model, settings_dir=model_dir, state={"step": 1}, keep=None)
    return writer


@pytest.mark.parametrize(
    "settings",
    [
        {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": 2, "pad_token_id": 0},
        {"temperature": 0.6},
        {"do_sample": False, "top_k": 5},
        {"pad_token_id": -1},
    ],
)
def test_settings_that_transformers_does_not_write_are_told_before_and_kept_byte_for_byte(
    model_with, tmp_path, settings
) -> None:
    directory = model_with(**settings)
    (warning,) = check_model_files(directory, "trained").warnings
    assert warning.startswith(f"--model {directory}: {GENERATION}: transformers reads it and does not write it (")
    assert [*settings][0 if len(settings) == 1 else 1] in warning
    save(directory, tmp_path / "step-1")
    assert (tmp_path / "step-1" / GENERATION).read_bytes() == (directory / GENERATION).read_bytes()
    assert CheckpointReader(tmp_path / "step-1").kinds == {"exp_avg"}
    assert check_model_files(tmp_path / "step-1", "trained", "sampled").warnings, "and its checkpoint trains, too"


def test_settings_that_transformers_writes_are_as_it_writes_them(model_with, tmp_path) -> None:
    directory = model_with(do_sample=True, temperature=0.5, eos_token_id=2)
    assert check_model_files(directory, "trained").warnings == ()
    save(directory, tmp_path / "step-1")
    GenerationConfig.from_pretrained(directory).save_pretrained(tmp_path / "plain")
    assert (tmp_path / "step-1" / GENERATION).read_bytes() == (tmp_path / "plain" / GENERATION).read_bytes()


def refuse(_: Path) -> None:
    raise ValueError("this config\ncannot be written")


def test_a_config_that_cannot_be_written_at_the_end_is_the_models_own_and_told(model_dir, tmp_path) -> None:
    config = AutoConfig.from_pretrained(model_dir)
    config.save_pretrained = refuse
    lines = [*write_settings(tmp_path, config, None, model_dir)]
    assert lines == [
        "config.json: transformers reads it and does not write it (this config cannot be written): checkpoints get it "
        "as it is"
    ]
    assert AutoConfig.from_pretrained(tmp_path).num_hidden_layers == 1


def test_without_a_file_to_copy_the_settings_are_left_out_and_told(model_dir, tmp_path) -> None:
    (tmp_path / "from").mkdir()
    generation = SimpleNamespace(save_pretrained=refuse)
    lines = [*write_settings(tmp_path, AutoConfig.from_pretrained(model_dir), generation, tmp_path / "from")]
    assert lines == [
        "generation_config.json: transformers does not write it (this config cannot be written): checkpoints are "
        "without it"
    ]
    assert [path.name for path in tmp_path.glob("*.json")] == ["config.json"]


def test_settings_that_cannot_be_read_any_more_do_not_cost_the_weights(
    model_with, tmp_path, caplog, monkeypatch
) -> None:
    directory = model_with(do_sample=False, temperature=0.9, eos_token_id=2)  # transformers does not write these
    read_bytes = Path.read_bytes

    def gone(path: Path) -> bytes:
        if path == directory / GENERATION:
            raise OSError(5, "Input/output error", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    save(directory, tmp_path / "step-1")
    assert GENERATION in caplog.text and "Input/output error" in caplog.text
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path / "step-1").get_input_embeddings().weight,
        AutoModelForCausalLM.from_pretrained(directory).get_input_embeddings().weight,
    )
    assert CheckpointReader(tmp_path / "step-1").kinds == {"exp_avg"}
    assert not (tmp_path / "step-1" / GENERATION).exists()


def test_a_full_disk_is_still_an_error(model_with, tmp_path, monkeypatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    directory = model_with(do_sample=False, temperature=0.9, eos_token_id=2)
    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(RunError, match="No space left"):
        save(directory, tmp_path / "step-1")
