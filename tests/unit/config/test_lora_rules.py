"""Test where engines cannot get adapters alone."""

import pytest

from coati_rl.config import Config
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.config.trainer_rules import trainer_problems
from coati_rl.errors import ConfigError
from coati_rl.preflight.adapter import with_adapter

RUN = {"num_inferencer": 1, "num_trainers": 1, "lora_sync": "adapter"}


def test_a_rank_that_engines_do_not_take_is_refused():
    (found,) = trainer_problems(Config(**RUN, lora_rank=513))
    assert found.startswith("--lora-sync adapter with --lora-rank 513: vLLM takes ranks up to 512")


@pytest.mark.parametrize("backend", ["vllm", "fake"])
def test_it_is_taken_with_an_engine_that_has_adapters(backend):
    config = Config(**RUN, lora_rank=512, backend=backend)
    assert [*trainer_problems(config)] == []
    assert config.lora.sent_adapter == config.lora.spec
    assert Config(num_inferencer=1, num_trainers=1, lora_rank=8).lora.sent_adapter is None


def test_a_job_without_engines_sends_nothing():
    job = SftJobConfig(num_trainers=1, lora_rank=8, lora_sync="adapter")
    assert [*trainer_problems(job)] == ["--lora-sync adapter: has no effect, as there are no engines; leave it out"]


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_trainers": 2}, {"num_trainers": 2, "pipeline_parallel_size": 2}, {"num_trainers": 2, "zero_stage": 2}],
)
def test_a_model_in_4_bits_has_copies_stages_and_zero(settings):
    assert not [*trainer_problems(Config(lora_rank=8, load_in_4bit=True, **settings))]


def test_without_bitsandbytes_nothing_starts(monkeypatch):
    monkeypatch.setattr("coati_rl.preflight.adapter.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="the package bitsandbytes is not installed"):
        with_adapter(Config(lora_rank=8, load_in_4bit=True))
