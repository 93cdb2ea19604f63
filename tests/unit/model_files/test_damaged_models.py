"""Test that a damaged model directory ends each command with exit code 2 and the file, tensor or field at fault.

The model has one layer, width 64, a vocabulary of 272 and an LM head that is its embedding.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import rl_example
import rl_generate
from coati_rl.config.commands import OFFLINE
from coati_rl.errors import ConfigError
from coati_rl.model_files.check import check_model_files
from consumer.__main__ import _main as dataset_main
from consumer.models.policy_model import load_policy
from producer.__main__ import serve_main

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DOWN = "model.layers.0.mlp.down_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
LOADED = ("sft", "load")  # what the trainer refuses by itself, too


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[[Path], None]:
    """Replace the tensors of the file."""

    def damage(directory: Path) -> None:
        changed = change(load_file(directory / WHOLE))
        save_file({name: each.contiguous() for name, each in changed.items()}, directory / WHOLE, {"format": "pt"})

    return damage


def value(number: float) -> Callable[[Path], None]:
    def change(found: dict[str, Tensor]) -> dict[str, Tensor]:
        found[DOWN][3, 5] = number
        return found

    return tensors(change)


def settings(name: str, **changes: object) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **changes}))

    return damage


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).write_text(content) and None


def cut(directory: Path, size: int) -> None:
    (directory / WHOLE).write_bytes((directory / WHOLE).read_bytes()[:size])


def shards(missing: str | None = None, lacks: str | None = None, twice: str | None = None) -> Callable[[Path], None]:
    """Two files and an index; one file is `missing`, or lacks a tensor, or both hold one."""

    def damage(directory: Path) -> None:
        found = load_file(directory / WHOLE)
        (directory / WHOLE).unlink()
        halves = {
            "model-1.safetensors": [EMBEDDING],
            "model-2.safetensors": [name for name in found if name != EMBEDDING],
        }
        index = {"weight_map": {name: file for file, names in halves.items() for name in names}}
        (directory / INDEX).write_text(json.dumps(index))
        for file, names in halves.items():
            held = [name for name in [*names, *([twice] if twice else [])] if name != lacks]
            if file != missing:
                save_file({name: found[name] for name in held}, directory / file, {"format": "pt"})

    return damage


def pickled(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        found = load_file(directory / WHOLE)
        (directory / WHOLE).unlink()
        torch.save(change(found), directory / "pytorch_model.bin")

    return damage


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda found: {key: each for key, each in found.items() if key != name}


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a tensor is missing": (tensors(without(DOWN)), f"the files lack {DOWN}"),
    "a tensor too many": (tensors(lambda f: f | {"model.bias": torch.zeros(2)}), "Qwen3ForCausalLM has no model.bias"),
    "another shape": (
        tensors(lambda f: f | {EMBEDDING: f[EMBEDDING][:200]}),
        f"{EMBEDDING} has the shape [200, 64] instead of [272, 64]",
    ),
    "more layers in config.json": (
        settings("config.json", num_hidden_layers=2, layer_types=["full_attention"] * 2),
        "the files lack model.layers.1.input_layernorm.weight",
    ),
    "an untied head that is not there": (settings("config.json", tie_word_embeddings=False), f"lack {HEAD}"),
    "all names under another prefix": (
        tensors(lambda f: {f"base_model.model.{name}": each for name, each in f.items()}),
        "all names in the files begin with 'base_model.model.'",
    ),
    "a cut-off file": (lambda d: cut(d, -100), f"{WHOLE} is cut off or damaged"),
    "a cut-off header": (lambda d: cut(d, 100), f"{WHOLE} is cut off or damaged"),
    "an empty file": (lambda d: cut(d, 0), f"{WHOLE} is cut off or damaged"),
    "no file": (lambda d: (d / WHOLE).unlink(), f"neither {WHOLE} nor {INDEX}"),
    "a missing shard": (shards(missing="model-2.safetensors"), "model-2.safetensors is missing, where"),
    "a tensor that is not in its shard": (shards(lacks=DOWN), f"model-2.safetensors lacks {DOWN}"),
    "a tensor in two shards": (shards(twice=DOWN), f"{DOWN} is in model-1.safetensors and in model-2.safetensors"),
    "an index of other files": (
        settings(INDEX, weight_map={EMBEDDING: "old.safetensors"}),
        f"{INDEX} names old.safetensors, and there is a {WHOLE} too",
    ),
    "an index without files": (lambda d: (shards()(d), text(INDEX, '{"weight_map": {}}')(d)), f"{INDEX} cannot be"),
    "NaN": (value(float("nan")), f"{WHOLE}: {DOWN} has NaN"),
    "infinity": (value(float("-inf")), f"{WHOLE}: {DOWN} has infinite values"),
    "config.json that is not JSON": (text("config.json", '{"model_type": '), "config.json cannot be read"),
    "config.json with text for a number": (settings("config.json", num_hidden_layers="two"), "config.json"),
    "a class that cannot be built": (settings("config.json", hidden_act="none"), "config.json: no qwen3 can be built"),
    "a token id that is text": (settings("generation_config.json", eos_token_id="</s>"), "eos_token_id is '</s>'"),
    "a temperature that is text": (settings("generation_config.json", temperature="hot"), "temperature is 'hot'"),
    "generation_config.json that is not JSON": (
        text("generation_config.json", "{"),
        "generation_config.json cannot be read",
    ),
    "GPTQ": (settings("config.json", quantization_config={"quant_method": "gptq", "bits": 4}), "quant_method gptq"),
    "compressed-tensors": (
        settings("config.json", quantization_config={"quant_method": "compressed-tensors", "format": "int-quantized"}),
        "quant_method compressed-tensors",
    ),
    "AWQ": (settings("config.json", quantization_config={"quant_method": "awq", "bits": 4}), "quant_method awq"),
    "bitsandbytes": (
        settings("config.json", quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "quant_method bitsandbytes",
    ),
    "an adapter": (settings("adapter_config.json", peft_type="LORA"), "holds an adapter and not a model"),
    "a tokenizer that is not JSON": (text("tokenizer.json", "{"), "the tokenizer cannot be loaded"),
    "a pickled file that lacks a tensor": (pickled(without(DOWN)), f"the files lack {DOWN}"),
    "a pickled file of something else": (pickled(lambda f: {"epoch": 3}), "epoch is a int and no tensor"),
    "a pickled file that is cut off": (
        lambda d: (pickled(dict)(d), (d / "pytorch_model.bin").write_bytes(b"PK")),
        "pytorch_model.bin cannot be read",
    ),
}  # fmt: skip


@pytest.fixture
def damaged(model_dir: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A damaged copy of the model."""

    def make(damage: str) -> Path:
        directory = tmp_path / "model"
        shutil.copytree(model_dir, directory)
        WRONG[damage][0](directory)
        return directory

    return make


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command, which has to refuse; returns its one message."""
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    row = {"messages": turns, "prompt": "q", "chosen": "a", "rejected": "b", "gt_answer": "1"}
    monkeypatch.setattr("coati_rl.driver.command.prepare_ray_environment", lambda config: pytest.fail("it was started"))
    monkeypatch.setattr(os, "environ", os.environ.copy())  # commands set variables of their engines

    def run(command: str, *flags: object) -> str:
        if command in ("rl", "generate"):
            del row["messages"]
        rows.write_text(json.dumps(row) + "\n")
        arguments = [*map(str, flags), "--device", "cpu"]
        if command == "serve":
            code = serve_main([*arguments[1:], "--dry-run"], tmp_path)
        elif command == "generate":
            monkeypatch.setattr("producer.engines.create_engine", lambda *_, **__: pytest.fail("it was started"))
            flags = ["-mpt", "64", "-mnt", "8", "-o", str(tmp_path / "run"), "--prompt-key", "prompt"]
            monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
            code = rl_generate.main([*arguments, "-d", str(rows), *flags], tmp_path)
        elif command == "rl":
            sizes = [f"{flag}=1" for flag in ("-t", "-i", "-ibs", "-imbs", "-tbs", "-tMbs")]
            sizes += ["-mpt", "64", "-mnt", "64", "-rt", "boxed", "--prompt-key", "prompt"]
            monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
            code = rl_example.main([*arguments, *sizes, "-d", str(rows), "--run-dir", str(tmp_path / "run")], tmp_path)
        else:
            arguments += ["-d", str(rows), "-tbs", "1", "--run-dir", str(tmp_path / "run")]
            code = dataset_main(OFFLINE[command], arguments, tmp_path)
        printed = capsys.readouterr().err
        assert code == 2 and printed.count("\n") == 1, printed
        assert not ray.is_initialized() and not (tmp_path / "run").exists()
        return printed

    return run


@pytest.mark.sampled(3)
@pytest.mark.parametrize("damage", WRONG)
def test_a_damaged_model_is_refused_by_file_tensor_or_field_before_anything_starts(damaged, run, damage) -> None:
    directory = damaged(damage)
    message = run("sft", "-m", directory)
    assert message.startswith(f"coati-rl sft: --model {directory}: "), message
    assert WRONG[damage][1] in message


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("command", "damage", "flag"),
    [
        ("rl", "a tensor is missing", "--model"),
        ("rl", "a cut-off file", "--model"),
        ("rl", "GPTQ", "--model"),
        ("rl", "a tensor is missing", "--teacher"),
        ("sft", "NaN", "--teacher"),
        ("dpo", "a missing shard", "--model"),
        ("dpo", "an untied head that is not there", "--reference-model"),
        ("rm", "a tensor is missing", "--model"),
        ("kto", "another shape", "--model"),
        ("serve", "a tensor is missing", "--model"),
        ("serve", "infinity", "--model"),
        ("serve", "a token id that is text", "--model"),
        ("generate", "a missing shard", "--model"),
    ],
)
def test_every_job_refuses_it_in_every_role(damaged, run, model_dir, command, damage, flag) -> None:
    directory = damaged(damage)
    models = ("-m", directory) if flag == "--model" else ("-m", model_dir, flag, directory)
    message = run(command, *models, *(() if command in ("serve", "generate") else ("--dry-run",)))
    assert f": {flag} {directory}: " in message and WRONG[damage][1].replace("CausalLM", "") in message


@pytest.mark.parametrize(
    "damage",
    [
        "a tensor is missing",
        "a tensor too many",
        "another shape",
        "more layers in config.json",
        "an untied head that is not there",
        "all names under another prefix",
        "NaN",
        "a cut-off file",
        "GPTQ",
        "a pickled file that lacks a tensor",
    ],
)
def test_a_trainer_refuses_it_by_itself(damaged, damage) -> None:
    directory = damaged(damage)
    expected = {"NaN": f"{DOWN} has NaN", "GPTQ": "cannot be loaded"}
    with pytest.raises(ConfigError) as caught:
        load_policy(directory, dtype=torch.float32)
    assert expected.get(damage, WRONG[damage][1]) in str(caught.value)
    assert str(caught.value).startswith(f"--model {directory}")


def test_values_of_large_files_are_left_to_the_trainers(damaged, monkeypatch) -> None:
    directory = damaged("NaN")
    monkeypatch.setattr("coati_rl.model_files.values.MAX_SCANNED_BYTES", 1000)
    assert check_model_files(directory, "trained").warnings == ()
    with pytest.raises(ConfigError, match=f"{DOWN} has NaN"):
        load_policy(directory, dtype=torch.float32)


def test_a_model_is_read_once_until_its_files_change(model_dir, tmp_path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(model_dir, directory)
    assert check_model_files(directory, "trained") is check_model_files(directory, "trained")
    value(float("nan"))(directory)
    with pytest.raises(ConfigError, match=f"{DOWN} has NaN"):
        check_model_files(directory, "trained")
