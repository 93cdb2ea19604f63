"""Test which jobs may have devices for their reference and teacher, and how many devices that makes."""

import pytest

from coati_rl.config.cli import parse, parse_job
from coati_rl.config.held_models import offloaded, remote_models
from coati_rl.config.jobs.dpo import DpoJobConfig
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError

RL = "-m m -d d -rt boxed -i 2 -t 4 -ptp 2 --ref-devices 3"


@pytest.mark.parametrize(
    ("flags", "roles"),
    [("-kl 0.1", "reference"), ("-kl 0 --teacher t", "teacher"), ("-kl 0.1 --teacher t", "reference teacher")],
)
def test_they_have_the_reference_and_the_teacher_and_are_counted(flags: str, roles: str) -> None:
    config, _ = parse(f"{RL} {flags} --offload all".split())
    assert remote_models(config) == {*roles.split()}
    assert offloaded(config) == {"optimizer"}
    assert config.num_devices == 2 * 2 + 4 + 3


def test_a_job_on_pairs_has_its_actors_in_ray_then() -> None:
    alone, _ = parse_job(["-m", "m", "-d", "d"], DpoJobConfig)
    config, _ = parse_job(["-m", "m", "-d", "d", "--ref-devices", "1"], DpoJobConfig)
    assert (alone.needs_ray, config.needs_ray) == (False, True)
    assert (remote_models(config), config.num_devices) == ({"reference"}, 2)
    check_offline(config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-kl 0", "--ref-devices 3: there is no reference and no teacher; leave it out"),
        ("-kl 0.1 --lora-rank 4", "--ref-devices 3: with --lora-rank the reference is the base on the trainers, where "
         "it takes no memory of its own; leave it out"),
        ("-kl 0.1 --offload reference", "--offload reference: trainers hold no reference model of its own, as "
         "--ref-devices 3 takes it off them; leave it out"),
    ],
)  # fmt: skip
def test_others_are_refused(flags: str, message: str) -> None:
    config, _ = parse(f"{RL} {flags}".split())
    with pytest.raises(ConfigError, match=message):
        check(config)
