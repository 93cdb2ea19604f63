"""Test where engines cannot get adapters alone."""

import pytest

from coati_rl.config import Config
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.config.lora_rules import lora_problems

RUN = {"num_inferencer": 1, "num_trainers": 1, "lora_sync": "adapter"}


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"backend": "transformers"}, "--lora-sync adapter with -b transformers: it computes without adapters"),
        ({"quantization": "fp8"}, "--lora-sync adapter with a quantized engine: its base would not be"),
        ({"engine_arg": ['quantization_config={"a": 1}']}, "--lora-sync adapter with a quantized engine"),
        ({"lora_rank": 513}, "--lora-sync adapter with --lora-rank 513: vLLM takes ranks up to 512"),
    ],
)
def test_it_is_refused_with_a_remedy(flags, problem):
    (found,) = lora_problems(Config(**{**RUN, "lora_rank": 8, **flags}))
    assert found.startswith(problem)


@pytest.mark.parametrize("backend", ["vllm", "fake"])
def test_it_is_taken_with_an_engine_that_has_adapters(backend):
    config = Config(**RUN, lora_rank=512, backend=backend)
    assert [*lora_problems(config)] == []
    assert config.lora.sent_adapter == config.lora.spec
    assert Config(num_inferencer=1, num_trainers=1, lora_rank=8).lora.sent_adapter is None


def test_a_job_without_engines_sends_nothing():
    job = SftJobConfig(num_trainers=1, lora_rank=8, lora_sync="adapter")
    assert [*lora_problems(job)] == ["--lora-sync adapter: has no effect, as there are no engines; leave it out"]
