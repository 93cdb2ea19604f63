"""Test that a text which no response can have is refused as one that ends it."""

import json

import pytest
from transformers import AutoTokenizer

from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from coati_rl.preflight.stop_texts import check_stop_texts


@pytest.fixture
def check(model_dir, tmp_path):
    """(flags) -> check their stop texts against a model whose generation_config.json declares <|tool|> as an end."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "<|tool|>"]})
    ends = [tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|tool|>")]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    def check(*flags):
        check_stop_texts(parse(["-d", "x.jsonl", *flags])[0], tokenizer, tmp_path)
        return tokenizer

    return check


def test_a_special_token_is_refused_with_its_id_and_the_file_of_end_tokens(check, tmp_path):
    number = check().convert_tokens_to_ids("<|user|>")
    message = rf"--stop <\|user\|>: a special token.*its id, {number}, to eos_token_id in .*generation_config\.json"
    with pytest.raises(ConfigError, match=message):
        check("--stop", "END", "--stop", "<|user|>")


def test_texts_and_tokens_that_end_responses_are_taken(check, tmp_path):
    tokenizer = check("--stop", "END", "--stop", "<|tool|>")
    (tmp_path / "generation_config.json").unlink()
    assert check("--stop", tokenizer.eos_token) is tokenizer
    with pytest.raises(ConfigError, match=r"--stop <\|tool\|>: a special token"):
        check("--stop", "<|tool|>")
