"""Test that models whose attention cannot share prefixes are named, and go without."""

import json

import pytest

from coati_rl.config.cli import parse
from coati_rl.runtime.prefix_sharing import with_prefix_sharing


@pytest.fixture
def model_of(tmp_path):
    def make(model_type):
        directory = tmp_path / model_type
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        return str(directory)

    return make


def test_a_model_with_packed_attention_shares_prefixes(model_of):
    config, warnings = with_prefix_sharing(parse([])[0], {"--model": model_of("qwen3"), "--teacher": None})
    assert config.shares_prefixes
    assert warnings == []


@pytest.mark.parametrize("flag", ["--model", "--teacher"])
def test_another_model_is_named_and_nothing_is_shared(model_of, flag):
    models = {"--model": model_of("qwen3"), "--teacher": None} | {flag: model_of("gemma3")}
    config, (warning,) = with_prefix_sharing(parse([])[0], models)
    assert not config.shares_prefixes
    assert warning == (
        f"--shared-prefix has no effect: {flag} {models[flag]} is a gemma3, and samples share prefixes in llama, "
        "mistral, qwen2, qwen3 only"
    )


def test_a_run_that_shares_nothing_anyway_is_not_warned(model_of):
    for flag in ("--no-shared-prefix", "--one-sample-per-row"):
        config = parse([flag])[0]
        assert with_prefix_sharing(config, {"--model": model_of("gemma3")}) == (config, [])


def test_a_model_that_is_not_on_this_machine_is_not_checked():
    config = parse([])[0]
    assert with_prefix_sharing(config, {"--model": "owner/name"}) == (config, [])
