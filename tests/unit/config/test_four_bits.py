"""Test where a model in 4 bits is refused, and with which remedy."""

import pytest

from coati_rl.config.cli import build_config
from coati_rl.config.lora_rules import lora_problems
from coati_rl.errors import ConfigError
from coati_rl.preflight.adapter import with_adapter

FOUR_BITS = {"model": "m", "dataset": "d", "lora_rank": 8, "load_in_4bit": True}


def problems(**settings):
    return list(lora_problems(build_config({**FOUR_BITS, **settings})))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"plugin": "fsdp2", "num_trainers": 2}, "--load-in-4bit with --plugin fsdp2: .*; use --plugin hybrid, or"),
        (
            {"tensor_parallel_size": 2, "num_trainers": 2},
            "--load-in-4bit with -tp 2: .*; use -tp 1, with -pp",
        ),
    ],
)
def test_what_is_not_there_is_refused_with_a_remedy(settings, message):
    with pytest.raises(ConfigError, match=message):
        if found := problems(**settings):
            raise ConfigError("; ".join(found))


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_trainers": 2}, {"num_trainers": 2, "pipeline_parallel_size": 2}, {"num_trainers": 2, "zero_stage": 2}],
)
def test_copies_stages_and_zero_have_no_problem(settings):
    assert not problems(**settings)


def test_without_bitsandbytes_nothing_starts(monkeypatch):
    monkeypatch.setattr("coati_rl.preflight.adapter.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package bitsandbytes is not installed"):
        with_adapter(build_config(FOUR_BITS))
