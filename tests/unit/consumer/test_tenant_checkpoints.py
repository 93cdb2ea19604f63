"""Test what models that share a base save: it goes on bit for bit; PEFT, merge and --adapter read it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import peft
import pytest
import torch

from coati_rl.errors import ConfigError
from coati_rl.tinker.core import AdamStep, ModelSpec
from consumer.tenants.rank import TenantRank
from tests.tenants import logprobs_of, make_rank, plain_pass, read_peft, request, write_start

STEP = AdamStep(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=1.0)


@pytest.fixture(scope="module")
def rank(model_dir: Path) -> TenantRank:
    return make_rank(model_dir)


def test_a_checkpoint_goes_on_bit_for_bit(rank: TenantRank, tmp_path: Path) -> None:
    rank.create("a", ModelSpec(rank=4, seed=1))
    rank.forward_backward([request("a", 1)])
    rank.optim_step("a", STEP)
    rank.save("a", tmp_path / "saved", True)
    rank.save("a", tmp_path / "weights", False)
    assert rank.load("b", tmp_path / "saved", True) == ""
    assert rank.load("c", tmp_path / "weights", False) == ""
    norms = {}
    for model in "abc":
        rank.forward_backward([request(model, 2, "ppo")])
        norms[model] = rank.optim_step(model, STEP)
    assert norms["a"] == norms["b"] and rank._base.sets["a"].kind == rank._base.sets["b"].kind
    a, b, c = (rank._base.sets[model].full(with_moments=True) for model in "abc")
    assert all(torch.equal(b[name], each) for name, each in a.items())
    assert not all(torch.equal(c[name], each) for name, each in a.items())
    assert "holds no optimizer state" in rank.load("d", tmp_path / "weights", True)


def test_an_adapter_of_another_base_or_shape_is_refused(rank: TenantRank, save_model, tmp_path: Path) -> None:
    other = save_model(tie_word_embeddings=True, hidden_size=64)
    write_start(other, tmp_path / "other")
    assert "has shape" in rank.load("z", tmp_path / "other", False)
    assert "cannot be loaded" in rank.load("z", tmp_path, False)
    assert "z" not in rank._base.sets


def test_the_loaded_adapters_are_read_by_the_flag_adapter_too(rank: TenantRank, tmp_path: Path, model_dir) -> None:
    from coati_rl.config.cli import build_job
    from coati_rl.config.commands import OFFLINE
    from coati_rl.model_files.config import read_config
    from coati_rl.preflight.adapter import with_adapter
    from consumer.adapters.check import check_adapters

    rank.create("a", ModelSpec(rank=4, trains_head=False))
    rank.save("a", tmp_path / "saved", True)
    assert isinstance(peft.PeftConfig.from_pretrained(tmp_path / "saved"), peft.LoraConfig)
    config = with_adapter(build_job({"model": str(model_dir), "adapter": str(tmp_path / "saved")}, OFFLINE["sft"]))
    check_adapters(config, read_config(model_dir, "--model"))
    assert config.lora.lora_rank == 4
    rank.create("b", ModelSpec(rank=4))
    rank.save("b", tmp_path / "with_head", False)
    both = {"model": str(model_dir), "adapter": str(tmp_path / "with_head")}
    check_adapters(with_adapter(build_job(both, OFFLINE["sft"])), read_config(model_dir, "--model"))
    two = build_job({**both, "num_trainers": 2, "plugin": "fsdp2"}, OFFLINE["sft"])
    with pytest.raises(ConfigError, match=r"adapts the LM head, too, .* -t 2, --plugin fsdp2; merge it into its base"):
        with_adapter(two)


@pytest.mark.full
def test_an_exported_model_with_an_adapter_of_its_head_is_what_peft_and_merge_compute(
    rank: TenantRank, tmp_path: Path, model_dir: Path
) -> None:
    """Of a base whose head is the embedding."""
    from transformers import AutoModelForCausalLM

    from consumer.adapters.merge import merge_adapter

    rank.create("h", ModelSpec(rank=4, seed=1))
    sent = request("h", 0)
    for _ in range(2):
        rank.forward_backward([sent])
        rank.optim_step("h", STEP)
    rank.save("h", tmp_path / "saved", False)
    merge_adapter(model_dir, tmp_path / "saved", tmp_path / "merged", where="ADAPTER")
    found = logprobs_of(rank.forward_backward([replace(sent, is_forward_only=True)]))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    for model in (read_peft(model_dir, tmp_path / "saved"), merged):
        _, expected = plain_pass(model, sent.data, sent.loss)
        for each, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(each, right, atol=1e-5)
    rank.drop("h")
