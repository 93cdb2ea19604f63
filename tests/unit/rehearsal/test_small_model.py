"""Test the small model of a rehearsal: it has vocabulary, tokenizer and heads of the one that it stands for."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from coati_rl.errors import ConfigError
from coati_rl.rehearsal.loaded import load_checkpoint
from coati_rl.rehearsal.small_model import write_small_model

SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 16, "num_key_value_heads": 8}


@pytest.fixture
def large(make_model_dir, tmp_path):
    """The directory of a model of 24 layers without its weights."""
    directory = tmp_path / "large"
    shutil.copytree(make_model_dir(), directory, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((directory / "config.json").read_text())
    layers = {"num_hidden_layers": 24, "layer_types": ["full_attention"] * 24}
    (directory / "config.json").write_text(json.dumps({**config, **SIZES, **layers}))
    return directory


def write(large, out, check=lambda _: None, **settings):
    sizes = {"num_heads": 2, "num_layers": 2, "precision": "bf16", **settings}
    write_small_model(large, out, where="--model large", check=check, **sizes)


def test_it_has_the_vocabulary_the_tokenizer_and_as_many_heads_as_ranks_divide(large, tmp_path):
    write(large, tmp_path / "small", num_layers=4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype="auto")
    config = model.config
    assert (config.vocab_size, config.num_hidden_layers, config.tie_word_embeddings) == (272, 4, True)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert model.dtype == torch.bfloat16 and model.num_parameters() < 1_000_000
    tokens = [AutoTokenizer.from_pretrained(each)("1 + 1 = 2").input_ids for each in (large, tmp_path / "small")]
    assert tokens[0] == tokens[1]
    assert "Qwen3ForCausalLM" in load_checkpoint(tmp_path / "small")


def test_a_size_that_the_layout_does_not_divide_is_not_taken(large, tmp_path):
    def check(config):
        if config.num_key_value_heads % 4:
            raise ConfigError("-tp 4")

    write(large, tmp_path / "small", check, num_heads=1)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "small").config.num_key_value_heads == 4


def test_an_architecture_that_accepts_no_small_size_is_refused_by_name(large, tmp_path):
    def check(config):
        raise ConfigError("no size")

    with pytest.raises(ConfigError, match=r"--model large \(qwen3\): no small model of it can be made .*no size"):
        write(large, tmp_path / "small", check)
