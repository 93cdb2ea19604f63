"""Test that the transformers engine refuses architectures whose caches or layers cannot decode padded batches."""

import pytest
from transformers import AutoConfig

from coati_rl.errors import ConfigError
from producer.engines.decoding_trial import check_decoding

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
}


@pytest.fixture
def directory(tmp_path):
    def save(model_type, **settings):
        AutoConfig.for_model(model_type, **{**SIZES, **settings}).save_pretrained(tmp_path)
        return tmp_path

    return save


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "opt"])
def test_an_architecture_that_decodes_padded_prompts_is_accepted(directory, model_type):
    settings = {"word_embed_proj_dim": 32, "ffn_dim": 64} if model_type == "opt" else {}
    assert check_decoding(directory(model_type, **settings)) is None


def test_a_cache_whose_rows_cannot_be_chosen_is_refused(directory):
    model = directory("lfm2", layer_types=["conv", "full_attention"])
    with pytest.raises(ConfigError) as caught:
        check_decoding(model)
    message = str(caught.value)
    assert message.startswith(
        f"--backend transformers: it cannot generate with --model {model}, a lfm2 (AttributeError"
    )
    assert message.endswith("; use --backend vllm")


def test_log_probabilities_that_padding_changes_are_refused(directory, monkeypatch):
    monkeypatch.setattr("producer.engines.decoding_trial.decoding_difference", lambda model: 0.02)
    with pytest.raises(ConfigError, match=r"padded prompts are off by 0\.02 nats\); use --backend vllm"):
        check_decoding(directory("llama"))
