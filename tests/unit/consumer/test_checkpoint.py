"""A checkpoint appears whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coati_rl.errors import ConfigError, RunError
from consumer import checkpoint
from consumer.checkpoint import load_optimizer_tensors, load_state, save_checkpoint


class StubModel:
    """Stands where a transformers model would: it writes one file."""

    def __init__(self, content: str = "weights") -> None:
        self.content = content

    def save_pretrained(self, directory: Path) -> None:
        (directory / "model.safetensors").write_text(self.content)


def save(directory: Path, tokenizer_dir: Path, *, content: str = "weights", state: object = None) -> None:
    save_checkpoint(
        directory,
        model=StubModel(content),
        tokenizer_dir=tokenizer_dir,
        optimizer_tensors={"step/a": torch.tensor(3.0), "exp_avg/a": torch.arange(4.0).reshape(2, 2).T},
        state={"step": 3} if state is None else state,
    )


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tokenizer.json").write_text('{"tokens": "ä"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "optimizer.safetensors").write_text("of an earlier run: not to be copied")
    return directory


def test_what_is_saved_can_be_loaded(tmp_path: Path, tokenizer_dir: Path) -> None:
    directory = tmp_path / "checkpoints" / "step-3"
    save(directory, tokenizer_dir)
    assert load_state(directory) == {"step": 3}
    tensors: dict[str, Tensor] = load_optimizer_tensors(directory)
    assert tensors["step/a"].item() == 3.0
    assert tensors["exp_avg/a"].tolist() == [[0.0, 2.0], [1.0, 3.0]]
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (directory / name).read_bytes() == (tokenizer_dir / name).read_bytes()


def test_a_checkpoint_that_is_there_is_replaced(tmp_path: Path, tokenizer_dir: Path) -> None:
    directory = tmp_path / "step-3"
    save(directory, tokenizer_dir, content="old", state={"step": 3, "try": 1})
    (directory / "stray").touch()
    save(directory, tokenizer_dir, content="new")
    assert (directory / "model.safetensors").read_text() == "new"
    assert not (directory / "stray").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"model", "step-3"}


def test_what_a_killed_run_left_half_written_is_cleared_away(tmp_path: Path, tokenizer_dir: Path) -> None:
    partial = tmp_path / ".step-3.partial"
    partial.mkdir()
    (partial / "half").touch()
    save(tmp_path / "step-3", tokenizer_dir)
    assert not (tmp_path / "step-3" / "half").exists()
    assert not partial.exists()


def test_until_the_last_byte_is_on_the_disk_the_name_does_not_exist(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, flushed = tmp_path / "step-3", list[str]()
    flush = checkpoint._flush

    def recorded(path: Path) -> None:
        flushed.append(path.name)
        assert directory.exists() == (path == tmp_path)  # only the parent's own entry is flushed after the rename
        flush(path)

    monkeypatch.setattr(checkpoint, "_flush", recorded)
    save(directory, tokenizer_dir)
    files = {path.name for path in directory.iterdir()}
    assert files <= set(flushed[:-2])
    assert flushed[-2:] == [".step-3.partial", tmp_path.name]


def test_state_that_is_no_json_leaves_no_checkpoint(tmp_path: Path, tokenizer_dir: Path) -> None:
    with pytest.raises(TypeError):
        save(tmp_path / "step-3", tokenizer_dir, state={"step": object()})
    assert not (tmp_path / "step-3").exists()


def test_a_disk_that_refuses_is_a_run_error_that_names_the_checkpoint(tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="file/step-3 could not be written"):
        save(tmp_path / "file" / "step-3", tokenizer_dir)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no checkpoint to resume from"):
        load_state(tmp_path)
    with pytest.raises(ConfigError, match="is no checkpoint to resume from"):
        load_optimizer_tensors(tmp_path)
    (tmp_path / "state.json").write_text(json.dumps({"step": 1})[:-1])
    with pytest.raises(ConfigError, match="is no checkpoint to resume from"):
        load_state(tmp_path)
