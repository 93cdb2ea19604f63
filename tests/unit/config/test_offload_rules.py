"""Test what --offload takes, and that models which a job does not have are refused."""

import pytest

from coati_rl.config.cli import parse, parse_job
from coati_rl.config.held_models import offloaded
from coati_rl.config.jobs.dpo import DpoJobConfig
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError

RL = "-m m -d d -rt boxed"


@pytest.mark.parametrize("flags", ["--offload optimizer reference", "--offload optimizer,reference -t 2"])
def test_several_are_given_one_after_the_other_or_with_commas(flags: str) -> None:
    config, _ = parse(f"{RL} {flags} -kl 0.1".split())
    assert config.parallel.offload == ("optimizer", "reference")


@pytest.mark.parametrize(
    ("flags", "models"),
    [
        ("-kl 0", ""),
        ("-kl 0.1", "reference"),
        ("-kl 0.1 --teacher t", "reference teacher"),
        # One sync serves two optimizer steps.
        ("-kl 0 --old-logprobs trainer -ibs 64 -i 1 -t 1 -tbs 32", "old"),
        ("-kl 0 --old-logprobs trainer -ibs 32 -i 1 -t 1 -tbs 32", ""),
        ("-kl 0.1 --lora-rank 4 --old-logprobs trainer -ibs 64 -i 1 -t 1 -tbs 32", ""),  # on the policy's base
    ],
)
def test_all_is_the_optimizer_and_the_frozen_models_of_a_run(flags: str, models: str) -> None:
    config, _ = parse(f"{RL} --offload all {flags}".split())
    assert offloaded(config) == {"optimizer", *models.split()}
    check(config)


@pytest.mark.parametrize(
    ("flags", "models"),
    [
        ("", "reference"),
        ("--loss simpo", ""),
        ("--lora-rank 4", ""),
        ("--lora-rank 4 --reference-model other", "reference"),
    ],
)
def test_all_of_a_job_on_pairs(flags: str, models: str) -> None:
    config, _ = parse_job(f"-m m -d d --offload all {flags}".split(), DpoJobConfig)
    assert offloaded(config) == {"optimizer", *models.split()}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("optimizer reference -kl 0", "--offload optimizer,reference: trainers hold no reference model of its own; use "
         "--offload optimizer"),
        ("reference teacher -kl 0", "hold no reference and no teacher model of its own; leave it out"),
        ("reference -kl 0.1 --lora-rank 4", "as with --lora-rank it is the model's base, which takes no memory of its "
         "own; leave it out"),
    ],
)  # fmt: skip
def test_a_model_that_a_run_does_not_have_is_refused(flags: str, message: str) -> None:
    config, _ = parse(f"{RL} --offload {flags}".split())
    with pytest.raises(ConfigError, match=message):
        check(config)


def test_a_model_that_a_job_does_not_have_is_refused() -> None:
    config, _ = parse_job(["-m", "m", "-d", "d", "--offload", "teacher"], SftJobConfig)
    with pytest.raises(ConfigError, match="trainers hold no teacher model of its own; leave it out"):
        check_offline(config)


def test_another_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(
        ConfigError, match=r"--offload .*'weights': Input should be 'optimizer', 'reference', 'teacher'"
    ):
        parse(f"{RL} --offload weights".split())
