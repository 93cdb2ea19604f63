"""Test that samples share rows and prefixes only in models that compute them apart."""

import json

import pytest

from coati_rl.config.cli import parse
from coati_rl.config.model import PACKED_ATTENTION
from coati_rl.preflight.sample_rows import with_sample_rows


@pytest.fixture
def model_of(tmp_path):
    def make(model_type):
        directory = tmp_path / model_type
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
        return str(directory)

    return make


def rows_of(config, models, *, differences=()):
    """`differences`: by the last part of the directory's name, where packed samples change each other."""

    def try_model(config, directory, *, flag):
        return dict(differences).get(directory.name, 0.0)

    return with_sample_rows(config, models, try_model=try_model)


def test_a_model_with_packed_attention_shares_prefixes(model_of):
    config, warnings = rows_of(parse([])[0], {"--model": model_of("qwen3"), "--teacher": None})
    assert config.shares_prefixes
    assert warnings == []


@pytest.mark.parametrize("flag", ["--model", "--teacher"])
def test_another_model_is_named_and_nothing_is_shared(model_of, flag):
    models = {"--model": model_of("qwen3"), "--teacher": None} | {flag: model_of("gemma3")}
    config, (warning,) = rows_of(parse([])[0], models)
    assert not config.shares_prefixes
    assert warning == (
        f"--shared-prefix has no effect: {flag} {models[flag]} is a gemma3_text, and samples share prefixes in "
        f"{', '.join(sorted(PACKED_ATTENTION))} only"
    )


def test_a_run_that_shares_nothing_anyway_is_not_warned(model_of):
    for flag in ("--no-shared-prefix", "--one-sample-per-row"):
        config = parse([flag])[0]
        assert rows_of(config, {"--model": model_of("gemma3")}) == (config, [])


def test_a_model_that_is_not_on_this_machine_is_not_tried():
    config = parse([])[0]
    assert rows_of(config, {"--model": "owner/name"}) == (config, [])


@pytest.mark.parametrize("flag", ["--model", "--teacher"])
def test_samples_that_see_each_other_in_a_packed_row_get_rows_of_their_own(model_of, flag):
    models = {"--model": model_of("qwen3"), "--teacher": None} | {flag: model_of("opt")}
    config, (warning,) = rows_of(parse([])[0], models, differences={"opt": 2.51})
    assert config.parallel.one_sample_per_row
    assert not config.shares_prefixes
    assert warning == (
        f"--one-sample-per-row is set: the layers of {flag} {models[flag]} see other samples of a packed row "
        "(log-probabilities change by up to 2.5 nats)"
    )


def test_who_asked_for_rows_of_one_sample_is_not_told(model_of):
    config = parse(["--one-sample-per-row"])[0]
    assert rows_of(config, {"--model": model_of("opt")}, differences={"opt": 2.51}) == (config, [])
