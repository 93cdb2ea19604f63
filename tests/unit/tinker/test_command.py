"""Mistakes in the flags of `coati-rl tinker-serve` are one line with a remedy, before anything is loaded."""

import argparse

import pytest

from coati_rl.errors import ConfigError
from coati_rl.tinker.command import _keys, _models, _parser, _serve
from coati_rl.tinker.limits import Keys

KEY = "tml-0123456789abcdef"


def serve(*arguments):
    def make_base(*_):
        raise AssertionError("nothing is to be loaded")

    _serve(_parser().parse_args(list(arguments)), make_base, lambda _: None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x=/nowhere"], "has no config.json"),
        (["--model", "a b={dir}"], "a name has letters"),
        (["--model", "x={dir}", "--model", "x={dir}"], "given twice"),
        (["--model", "x={dir}", "--host", "0.0.0.0"], "without a key"),
        (["--model", "x={dir}", "--key", "anna=abc"], "begins with tml-"),
        (["--model", "x={dir}", "--key", f"anna={KEY}", "--key", f"bert={KEY}"], "anna's already"),
        (["--model", "x={dir}", "--keys-file", "/nowhere"], "cannot be read"),
        (["--model", "x={dir}", "--port", "99999"], "cannot listen"),
        (["--model", "x={dir}", "--model", "y={dir}", "--sampler", "vllm"], "give one --model"),
    ],
)
def test_a_mistake_names_the_flag_and_the_remedy(model_dir, tmp_path, arguments, message):
    given = [each.replace("{dir}", str(model_dir)) for each in arguments]
    with pytest.raises(ConfigError, match=message) as caught:
        serve(*given, "--root", str(tmp_path))
    assert "--" in str(caught.value)


@pytest.mark.parametrize(
    ("flag", "value", "remedy"),
    [
        ("--save-steps", "0", "a whole number from 1 on"),
        ("--max-models", "many", "a whole number from 1 on"),
        ("--poll-s", "nan", "a number above 0"),
        ("--max-checkpoint-gib", "inf", "a number above 0"),
    ],
)
def test_a_number_out_of_its_range_is_refused_with_its_flag(capsys, flag, value, remedy):
    with pytest.raises(SystemExit, match="2"):
        serve("--model", "x=/nowhere", "--root", "x", flag, value)
    assert f"argument {flag}: '{value}': give {remedy}" in capsys.readouterr().err


def test_models_and_keys_are_what_was_given(model_dir, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"bert={KEY}x\n\n")
    given = argparse.Namespace(key=[f"anna={KEY}"], keys_file=file)
    assert _keys(given).owners == {KEY: "anna", f"{KEY}x": "bert"}
    assert _models([f"Qwen/x={model_dir}", str(model_dir)]) == {"Qwen/x": model_dir, str(model_dir): model_dir}


def test_without_keys_all_calls_are_one_owner_s():
    assert Keys().owner("tml-x") == Keys().owner("") == "anyone"
