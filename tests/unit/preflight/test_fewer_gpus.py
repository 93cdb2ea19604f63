"""Test that the flags that are named where a machine has too few GPUs are flags with which the job starts."""

import re

import pytest
import torch

from coati_rl.config.cli import parse, parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.offline_rules import check_offline
from coati_rl.config.rules import check
from coati_rl.errors import ConfigError
from coati_rl.preflight.prepare_offline import DatasetPreparation
from coati_rl.preflight.size_checks import resolve_device

SIZES = "-kl 0 -g 4 -ibs 16 -imbs 4 -tbs 4 -tMbs 4 --device cuda"
FOUR_IN_TURNS = "-t 4 -i 4 -tp 4 -ibs 4 --colocate -nb 0"


@pytest.fixture
def num_gpus(monkeypatch):
    def have(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return have


@pytest.mark.parametrize(
    ("flags", "available", "trainers"),
    [
        (FOUR_IN_TURNS, 2, 2),
        ("-t 4 -i 2 -ptp 2 -tp 2 -b vllm --colocate -nb 0", 3, 2),
        ("-t 4 -i 1 -b http://host:8000", 2, 2),
        ("-t 4 -i 1 -b http://host:8000", 1, 1),
        ("-t 4 -i 2 -tp 2 -ptp 2 -b vllm", 1, 1),
    ],
)
def test_flags_that_fit_a_runs_gpus_pass_the_rules(num_gpus, flags, available, trainers):
    num_gpus(available)
    argv = [*SIZES.split(), *flags.split()]
    check(parse(argv)[0])
    with pytest.raises(ConfigError) as caught:
        resolve_device(parse(argv)[0], is_dry_run=False)
    named = re.search(r"(?:nearest:|use) ([^;,]*)[;,]", str(caught.value)).group(1).replace(" with ", " ")
    config = parse([*argv, *named.split()])[0]
    check(config)
    assert resolve_device(config, is_dry_run=False) == ("cuda", [])
    assert config.parallel.num_trainers == trainers


def test_a_run_that_others_may_join_counts_its_own_engines(num_gpus):
    num_gpus(1)
    with pytest.raises(ConfigError, match=r"GPUs = P \* ptp \+ T: 2 \* 1 \+ 1 = 3 are needed"):
        resolve_device(parse([*SIZES.split(), "-t", "1", "--join-port", "8443"])[0], is_dry_run=False)


@pytest.mark.parametrize(
    ("flags", "available", "remedy"),
    [
        ("-t 4", 3, "use -t 3"),
        ("-t 4 -tp 2", 3, "use -t 2"),
        ("-t 4 --ref-devices 2", 5, "use -t 3"),
        ("-t 4 --ref-devices 2", 2, "use -t 2 --ref-devices 0"),
        ("-t 4 -tp 4", 3, "use fewer of -tp, -pp and --context-parallel, or --device cpu"),
        ("-t 4", 0, "use --device cpu"),
    ],
)
def test_a_job_on_a_dataset_names_trainers_that_fit_beside_others_and_in_whole_groups(
    num_gpus, flags, available, remedy
):
    num_gpus(available)
    config = parse_job(["-d", "rows.jsonl", "--device", "cuda", *flags.split()], OFFLINE["dpo"])[0]
    check_offline(config)
    preparation = DatasetPreparation(check_layout=lambda *_: None, try_model=lambda *_: 0.0, is_dry_run=False)
    with pytest.raises(ConfigError) as caught:
        preparation.find_device(config)
    assert str(caught.value).endswith(f"this machine has {available}; {remedy}")
