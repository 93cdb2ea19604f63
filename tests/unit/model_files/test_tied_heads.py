"""Test a model whose config.json says that its LM head is the embedding, and whose file has an LM head too."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from coati_rl.checkpoint.resumed_run import check_shape
from coati_rl.config.cli import parse
from coati_rl.model_files.check import check_model_files
from coati_rl.preflight.resources import checked_model_config
from consumer.checkpoint import CheckpointWriter
from consumer.models.policy_model import load_policy
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import describe_parameters
from producer.engines.checkpoint import read_entries

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def with_head(model_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the model with an LM head: its embedding, which bfloat16 holds exactly, times a number."""

    def make(factor: float) -> Path:
        directory = tmp_path / f"times-{factor}"
        shutil.copytree(model_dir, directory)
        tensors = load_file(directory / "model.safetensors")
        embedding = tensors[EMBEDDING].bfloat16().float()
        changed = {**tensors, EMBEDDING: embedding, HEAD: embedding * factor}
        save_file(changed, directory / "model.safetensors", {"format": "pt"})
        return directory

    return make


def exported(directory: Path, dtype: torch.dtype) -> set[str]:
    """The names that a trainer sends to engines."""
    return {info.name for info in describe_parameters(load_policy(directory, dtype=dtype), Layout(), [1])}


@pytest.mark.parametrize(
    ("factor", "precision", "is_own"),
    # bfloat16 has 8 bits, which keep no factor of 1.0001.
    [(1, "fp32", False), (1.5, "fp32", True), (1, "bf16", False), (1.5, "bf16", True), (1.0001, "bf16", False)],
)
def test_trainer_engine_and_plan_agree_on_which_head_is_used(with_head, factor, precision, is_own) -> None:
    directory = with_head(factor)
    name = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    facts = check_model_files(directory, "trained", "sampled", precision=precision)
    assert facts.has_own_head is is_own
    sent = exported(directory, getattr(torch, name))
    assert (HEAD in sent) is is_own
    assert set(read_entries(directory, dtype=name)) == sent


def test_a_head_of_its_own_is_told_before_the_start_and_counted_in_the_plan(with_head, model_dir) -> None:
    directory = with_head(1.5)
    config, warnings = checked_model_config(directory, "trained", precision="fp32")
    assert config.tie_word_embeddings is False
    assert warnings == [
        f"--model {directory}: config.json says tie_word_embeddings, and the files have another {HEAD}: that one is "
        "used, by trainers and engines, and checkpoints say so"
    ]
    config, warnings = checked_model_config(with_head(1), "trained", precision="fp32")
    assert (config.tie_word_embeddings, warnings) == (True, [])


def test_its_checkpoint_says_so_holds_both_and_is_resumed_with_the_model(with_head, tmp_path) -> None:
    directory, checkpoint = with_head(1.5), tmp_path / "step-1"
    model = load_policy(directory, dtype=torch.float32)
    writer = CheckpointWriter(checkpoint, describe_parameters(model, Layout(), [1]), dtype=torch.float32)
    writer.begin()
    writer.write(0, dict(model.named_parameters()), {"step/model.norm.weight": torch.tensor(1.0)})
    writer.publish(model=model, settings_dir=directory, state={"step": 1}, keep=None)
    assert json.loads((checkpoint / "config.json").read_text())["tie_word_embeddings"] is False
    again = load_policy(checkpoint, dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)
    assert not torch.equal(again.lm_head.weight, again.get_input_embeddings().weight)
    check_shape(parse(["-m", str(directory)])[0], checkpoint)
