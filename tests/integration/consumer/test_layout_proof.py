"""Test that architectures that cannot be cut over ranks are refused by two processes that try it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from coati_rl.errors import ConfigError
from consumer.proofs import layout, layout_trial
from consumer.proofs.layout import check_layout_runs

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


def saved(directory: Path, model_type: str, **settings: Any) -> Path:
    AutoConfig.for_model(model_type, **{**SIZES, **settings}).save_pretrained(directory)
    return directory


@pytest.mark.full
@pytest.mark.parametrize(
    ("model_type", "settings", "refusal"),
    [
        ("granite", {"logits_scaling": 1.0}, None),
        ("olmo", {}, None),
        ("apertus", {}, r"the gradient of model\.layers\.\d\.mlp\.act_fn\.alpha_[pn] is off by "),
        ("cohere", {"logit_scale": 1.0, "use_qk_norm": True}, r"cannot be cut \("),
    ],
)
def test_two_tensor_parallel_ranks_give_plain_gradients_or_refuse(tmp_path, model_type, settings, refusal):
    model = saved(tmp_path, model_type, **settings)
    if refusal is None:
        assert check_layout_runs(model, name="--model m", tp_size=2, pp_size=1) is None
        return
    with pytest.raises(ConfigError, match=f"^-tp 2: --model m is a {model_type}, and {refusal}"):
        check_layout_runs(model, name="--model m", tp_size=2, pp_size=1)


@pytest.mark.full
def test_the_shards_under_fsdp2_are_tried_too(tmp_path):
    assert check_layout_runs(saved(tmp_path / "a", "olmo"), name="m", tp_size=2, pp_size=1, plugin="fsdp2") is None
    model = saved(tmp_path / "b", "apertus")
    with pytest.raises(ConfigError, match=r"is a apertus, and the gradient of model\.layers\.\d\.mlp\.act_fn\.alpha_"):
        check_layout_runs(model, name="m", tp_size=2, pp_size=1, plugin="fsdp2")


@pytest.mark.full
@pytest.mark.parametrize("model_type", ["olmo2", "starcoder2"])
def test_two_pipeline_stages_give_plain_gradients(tmp_path, model_type):
    assert check_layout_runs(saved(tmp_path, model_type), name="--model m", tp_size=1, pp_size=2) is None


def test_tested_architectures_and_single_ranks_start_no_process(tmp_path, monkeypatch):
    monkeypatch.setattr(layout.subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    for model_type, size in (("qwen3", 2), ("olmo", 1)):
        model = saved(tmp_path, model_type)
        assert check_layout_runs(model, name="--model m", tp_size=size, pp_size=size) is None


class _Cut:
    """A backend of tensor-parallel rank 1 of 2 whose part of `weight`, cut by rows, has this gradient."""

    def __init__(self, gradient: list[float]) -> None:
        self.layout = type("Layout", (), {"tp_size": 2})
        info = type("Info", (), {"split_dim": 0, "shape": (4,)})
        self.policy = type(
            "Policy",
            (),
            {
                "gradients": {"weight": torch.tensor(gradient)},
                "parameters": type("Parameters", (), {"infos": {"weight": info}}),
            },
        )


@pytest.mark.parametrize(
    ("gradient", "difference", "text"),
    [([3.0, 4.0], 0.0, ""), ([3.0, 4.4], 100.0, "the gradient of weight is off by 10.0%"), ([3.0], torch.inf, "shape")],
)
def test_a_rank_compares_its_part_of_each_gradient(gradient, difference, text):
    plain = torch.nn.Module()
    plain.weight = torch.nn.Parameter(torch.zeros(4))
    plain.weight.grad = torch.tensor([1.0, 2.0, 3.0, 4.0])
    found = layout_trial.of_gradients(_Cut(gradient), plain, rank=1)
    assert found[0] == pytest.approx(difference, rel=1e-3)
    assert re.search(text, found[1])


def test_a_process_that_ends_without_a_word_is_a_refusal(tmp_path, monkeypatch):
    monkeypatch.setattr(layout.sys, "executable", "/bin/true")
    with pytest.raises(ConfigError, match=r"cannot be cut \(a process ended\); use -tp 1"):
        check_layout_runs(saved(tmp_path, "olmo"), name="--model m", tp_size=2, pp_size=1)
