"""Test that a resumed run goes on as its checkpoint's did in settings that this one did not have yet."""

from pathlib import Path

import pytest
import yaml

from coati_rl.checkpoint.directory import write_manifest, write_state
from coati_rl.checkpoint.former_settings import with_former_settings
from coati_rl.checkpoint.resumed_run import read_settings
from coati_rl.config import Config
from coati_rl.config.cli import parse_job
from coati_rl.config.jobs.sft import SftJobConfig
from coati_rl.config.training import TrainingConfig

OWN = "/own.py:make"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "run" / "checkpoints" / "step-3"
    path.mkdir(parents=True)
    write_state(path, {"step": 3})
    write_manifest(path)
    return path


def write_settings(checkpoint: Path, config: TrainingConfig, *, without: str = "", **changes: str) -> None:
    settings = {name: value for name, value in (config.flat("json") | changes).items() if name != without}
    (checkpoint.parents[1] / "config.yaml").write_text(yaml.safe_dump(settings))


def resumed(checkpoint: Path, flags: str = "", job: type[TrainingConfig] = Config) -> tuple[str, int]:
    """Return the field of the resumed run, and the number of warnings about it."""
    config, warnings = with_former_settings(parse_job([*f"-cp {checkpoint} {flags}".split()], job)[0])
    return config.flat()["weight_decay_exempt"], len(warnings)


@pytest.mark.parametrize("job", [Config, SftJobConfig])
def test_a_run_that_did_not_write_the_field_let_all_parameters_decay_and_goes_on_so(
    checkpoint: Path, job: type[TrainingConfig]
) -> None:
    write_settings(checkpoint, job(), without="weight_decay_exempt")
    assert resumed(checkpoint, job=job) == ("none", 1)
    before = read_settings(job(), checkpoint)
    assert isinstance(before, TrainingConfig)
    assert before.flat()["weight_decay_exempt"] == "none"


def test_a_run_that_went_on_so_is_resumed_so_too(checkpoint: Path) -> None:
    write_settings(checkpoint, Config(), weight_decay_exempt="none")
    assert resumed(checkpoint) == ("none", 1)


def test_a_new_run_goes_on_as_it_began(checkpoint: Path) -> None:
    write_settings(checkpoint, Config())
    assert resumed(checkpoint) == ("norms_and_biases", 0)


def test_a_flag_that_is_given_decides(checkpoint: Path) -> None:
    write_settings(checkpoint, Config(), without="weight_decay_exempt")
    assert resumed(checkpoint, "--weight-decay-exempt norms_and_biases") == ("norms_and_biases", 0)


def test_without_a_checkpoint_or_its_settings_nothing_changes(checkpoint: Path) -> None:
    assert with_former_settings(Config()) == (Config(), ())
    assert resumed(checkpoint) == ("norms_and_biases", 0)
    for text in ("- 1", "a: b: c", "weight_decay: [1"):
        (checkpoint.parents[1] / "config.yaml").write_text(text)
        assert resumed(checkpoint) == ("norms_and_biases", 0)
        assert isinstance(read_settings(Config(), checkpoint), str)


def test_an_optimizer_of_the_users_own_decides_for_itself(checkpoint: Path) -> None:
    write_settings(checkpoint, Config(), without="weight_decay_exempt", optimizer=OWN)
    assert resumed(checkpoint, f"--optimizer {OWN}") == ("norms_and_biases", 0)
    before = read_settings(Config(), checkpoint)
    assert isinstance(before, Config)
    assert before.optimizer.weight_decay_exempt == "norms_and_biases"
