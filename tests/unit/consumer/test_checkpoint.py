"""Test that a checkpoint appears complete or not at all, in files of bounded size, readable by transformers."""

import json
import os
import shutil
from math import prod
from pathlib import Path

import pytest
import torch
import xxhash
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from coati_rl.checkpoint.directory import MANIFEST_FILE, read_state
from coati_rl.checkpoint.tokenizer_files import read_tokenizer_files
from coati_rl.errors import ConfigError, RunError
from coati_rl.model_files.stored_views import StoredParameter
from consumer import checkpoint
from consumer.backend import Backend
from consumer.checkpoint import CheckpointReader, CheckpointWriter
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import describe_parameters
from consumer.parallel.single_process import SingleProcess
from tests.backends import backend_config
from tests.unit.consumer.conftest import make_model

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Random weights in norms and embeddings too, so that no two tensors are the same."""
    model = make_model(tie_word_embeddings=True)
    for parameter in model.parameters():
        parameter.data.uniform_(-0.2, 0.2)
    return model


@pytest.fixture
def tokenizer_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tokenizer.json").write_text('{"tokens": "ä"}')
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "optimizer.safetensors").write_text("of an earlier run: not to be copied")
    return directory


def save(
    directory: Path,
    tokenizer_dir: Path,
    model: PreTrainedModel,
    *,
    state: object = None,
    keep: int | None = None,
    num_stages: int = 1,
    **settings: object,
) -> CheckpointWriter:
    """Its optimizer knows of every parameter that it took three steps; `exp_avg` is half the weight, transposed in
    memory, as what was joined along columns may be."""
    infos = describe_parameters(model, Layout(num_stages=num_stages), {1: [2], 2: [1, 1]}[num_stages])
    writer = CheckpointWriter(directory, infos, **{"dtype": torch.float32, **settings})
    writer.begin()
    for number, names in enumerate(writer.files):
        weights = {name: model.get_parameter(name).detach().to(writer._dtype) for name in names}
        steps = {f"step/{name}": torch.tensor(3.0) for name in names}
        averages = {f"exp_avg/{name}": (weight.float() / 2).t().contiguous().t() for name, weight in weights.items()}
        writer.write(number, weights, {**steps, **averages})
    files = read_tokenizer_files(tokenizer_dir)
    writer.publish(
        model=model,
        settings_dir=tokenizer_dir,
        state={"step": 3} if state is None else state,
        keep=keep,
        files=files,
    )
    return writer


def test_the_digest_of_a_file_is_that_of_its_bytes_whatever_tensors_it_holds(
    tmp_path: Path, model: PreTrainedModel
) -> None:
    writer = CheckpointWriter(tmp_path / "step-1", [], dtype=torch.float32)
    writer.begin()
    tensors = {
        "b": torch.arange(12.0).view(3, 4).t(),
        "a": torch.tensor(3.0),
        "c": torch.ones(5, dtype=torch.bfloat16),
        "nothing": torch.empty(0, 4),
        "byte": torch.tensor([7], dtype=torch.uint8),
    }
    for name, digest in writer.write(0, tensors, {"step/a": torch.tensor(1)}).items():
        assert digest == xxhash.xxh3_128_hexdigest((tmp_path / ".step-1.partial" / name).read_bytes()), name


def logits_of(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1, 2, 3, 4]]), use_cache=False).logits


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_it_is_a_hugging_face_directory_with_optimizer_state_and_manifest(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel
) -> None:
    directory = tmp_path / "checkpoints" / "step-3"
    save(directory, tokenizer_dir, model)
    assert names_in(directory) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        INDEX,
        "optimizer.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "state.json",
        "manifest.json",
    }
    assert names_in(directory.parent) == {"step-3"}
    assert read_state(directory) == {"step": 3}  # which compares every byte with the manifest
    listed = json.loads((directory / MANIFEST_FILE).read_text())["files"]
    assert set(listed) == names_in(directory) - {MANIFEST_FILE}
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (directory / name).read_bytes() == (tokenizer_dir / name).read_bytes()
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(directory)), logits_of(model))
    # Without an index vLLM would take the optimizer's tensors for weights, and not start.
    assert set(json.loads((directory / INDEX).read_text())["weight_map"].values()) == {"model.safetensors"}


def test_the_configuration_speaks_of_what_is_saved_and_not_of_the_trainer(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel
) -> None:
    save(tmp_path / "step-3", tokenizer_dir, model, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "step-3" / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("bfloat16", ["Qwen3ForCausalLM"])
    assert "packed_sdpa" not in json.dumps(config)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "step-3").dtype == torch.bfloat16


@pytest.mark.parametrize("num_stages", [1, 2])
def test_files_are_of_bounded_size_and_their_index_finds_every_tensor(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel, num_stages: int
) -> None:
    directory, limit = tmp_path / "step-3", 10_000
    writer = save(directory, tokenizer_dir, model, max_file_bytes=limit, num_stages=num_stages)
    total = len(writer.files)
    assert total >= 4
    infos = {info.name: info for info in writer._infos}
    for names in writer.files:
        assert sum(4 * prod(infos[name].shape) for name in names) <= limit
        assert len({infos[name].stage for name in names}) == 1  # each stage writes its own
    index = json.loads((directory / INDEX).read_text())
    assert list(index["weight_map"]) == list(infos)
    assert index["metadata"]["total_size"] == sum(4 * p.numel() for p in model.parameters())
    assert set(index["weight_map"].values()) == {f"model-{i + 1:05d}-of-{total:05d}.safetensors" for i in range(total)}
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(directory)), logits_of(model))
    reader = CheckpointReader(directory)
    assert all(torch.equal(reader.get("exp_avg", each.saved), model.get_parameter(n) / 2) for n, each in infos.items())
    assert read_state(directory) == {"step": 3}


def test_a_tensor_larger_than_a_file_has_one_of_its_own(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel
) -> None:
    writer = save(tmp_path / "step-3", tokenizer_dir, model, max_file_bytes=1)
    assert writer.files == [[info.name] for info in writer._infos]


def test_a_reader_gives_what_was_written_and_the_weight_where_there_is_no_master(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel
) -> None:
    save(tmp_path / "step-3", tokenizer_dir, model)
    reader, name = CheckpointReader(tmp_path / "step-3"), "model.layers.1.mlp.down_proj.weight"
    parameter = StoredParameter(name=name, shape=tuple(model.get_parameter(name).shape))
    assert reader.get("step", parameter).item() == 3.0
    assert torch.equal(reader.get("exp_avg", parameter), model.get_parameter(name) / 2)
    assert torch.equal(reader.get("master", parameter), model.get_parameter(name))
    assert reader.get("exp_avg_sq", parameter) is None


def test_a_reader_refuses_what_it_cannot_resume_from(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel
) -> None:
    model.save_pretrained(tmp_path / "plain")
    assert CheckpointReader(tmp_path / "plain").kinds == frozenset()  # of which the optimizer it is for is the judge
    save(tmp_path / "step-3", tokenizer_dir, model)
    with pytest.raises(ConfigError, match=r"belongs to another model: it has no lm_head\.weight"):
        CheckpointReader(tmp_path / "step-3").get("exp_avg", StoredParameter(name="lm_head.weight", shape=(1, 1)))
    assert CheckpointReader(tmp_path / "step-3").kinds == {"step", "exp_avg"}
    (tmp_path / "step-3" / "optimizer.safetensors").write_bytes(b"not tensors at all")
    with pytest.raises(ConfigError, match="step-3 is not a checkpoint to resume from"):
        CheckpointReader(tmp_path / "step-3")


def test_a_checkpoint_that_is_there_is_replaced(tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel) -> None:
    directory = tmp_path / "step-3"
    save(directory, tokenizer_dir, model, state={"step": 3, "try": 1})
    (directory / "stray").touch()
    save(directory, tokenizer_dir, model, state={"step": 3, "try": 2})
    assert read_state(directory) == {"step": 3, "try": 2}
    assert not (directory / "stray").exists()
    assert names_in(tmp_path) == {"model", "step-3"}


def test_only_the_newest_are_kept(tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel) -> None:
    directory = tmp_path / "checkpoints"
    for step in (8, 9, 10):
        save(directory / f"step-{step}", tokenizer_dir, model)
    assert names_in(directory) == {"step-8", "step-9", "step-10"}
    save(directory / "step-11", tokenizer_dir, model, keep=2)
    assert names_in(directory) == {"step-10", "step-11"}


def test_what_a_killed_run_left_half_written_is_cleared_away(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel
) -> None:
    partial = tmp_path / ".step-3.partial"
    partial.mkdir()
    (partial / "half").touch()
    save(tmp_path / "step-3", tokenizer_dir, model)
    assert not (tmp_path / "step-3" / "half").exists()
    assert not partial.exists()


def test_until_the_last_byte_is_on_the_disk_the_name_does_not_exist(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, flushed = tmp_path / "step-3", list[str]()
    fsync = os.fsync

    def recorded(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushed.append(path.name)
        assert directory.exists() == (path == tmp_path)  # only the parent's own entry is flushed after the rename
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    save(directory, tokenizer_dir, model)
    assert names_in(directory) <= set(flushed[:-2])
    assert flushed[-2:] == [".step-3.partial", tmp_path.name]


def test_state_that_is_no_json_leaves_no_checkpoint(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel
) -> None:
    with pytest.raises(TypeError):
        save(tmp_path / "step-3", tokenizer_dir, model, state={"step": object()})
    assert not (tmp_path / "step-3").exists()


@pytest.mark.parametrize("at", ["begin", "write", "publish"])
def test_a_disk_that_refuses_is_a_run_error_that_names_the_checkpoint(
    tmp_path: Path, tokenizer_dir: Path, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    directory = tmp_path / "step-3"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    if at == "begin":
        (tmp_path / "file").touch()
        directory = tmp_path / "file" / "step-3"
    else:
        monkeypatch.setattr(checkpoint, {"write": "save_file", "publish": "write_manifest"}[at], full)
    with pytest.raises(RunError, match=f"checkpoint {directory} cannot be written: "):
        save(directory, tokenizer_dir, model)
    assert not directory.exists()


def test_a_checkpoint_holds_the_tokenizer_that_the_run_began_with(model_dir: Path, tmp_path: Path) -> None:
    """Templates in a directory of their own too, even if the model's directory has changed or is gone."""
    model = tmp_path / "model"
    shutil.copytree(model_dir, model)
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }} {{ tools }}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    backend = Backend(backend_config(model), SingleProcess(device=torch.device("cpu")))
    shutil.rmtree(model)
    backend.save(tmp_path / "step-1", state={})
    read_state(tmp_path / "step-1")  # whose manifest has the template
    saved = AutoTokenizer.from_pretrained(tmp_path / "step-1")
    assert set(saved.chat_template) == {"default", "tool_use"} and saved.chat_template == tokenizer.chat_template
    assert saved.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
