"""A run writes where it was told, and never into another run."""

import pytest

from coati_rl.config.cli import parse
from coati_rl.errors import ConfigError
from coati_rl.runtime.run_dir import make_run_dir


def paths_of(*argv):
    return make_run_dir(parse(argv)[0])


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def test_the_directory_is_named_after_the_project_and_numbered_from_the_second_run_on(tmp_path):
    names = [paths_of("-p", "math").run_dir for _ in range(3)]
    assert names == [tmp_path / "runs/math", tmp_path / "runs/math-2", tmp_path / "runs/math-3"]


def test_a_given_directory_is_numbered_too(tmp_path):
    names = [paths_of("--run-dir", "deep/here").run_dir for _ in range(2)]
    assert names == [tmp_path / "deep/here", tmp_path / "deep/here-2"]


def test_all_output_goes_below_the_run_directory(tmp_path):
    paths = paths_of()
    run_dir = tmp_path / "runs/GRPO"
    assert (paths.checkpoints, paths.evaluation) == (run_dir / "checkpoints", run_dir / "eval")
    assert (paths.rollouts, paths.logs) == (run_dir / "rollouts", run_dir / "logs")


def test_each_output_may_go_elsewhere(tmp_path):
    paths = paths_of("-sd", "model", "-esd", "eval", "-rsd", "/abs/rollouts")
    assert (paths.checkpoints, paths.evaluation) == (tmp_path / "model", tmp_path / "eval")
    assert str(paths.rollouts) == "/abs/rollouts"
    assert paths.logs == tmp_path / "runs/GRPO/logs"


def test_the_resolved_configuration_is_written_and_can_be_read_back():
    argv = ("-t", "4", "-lr", "1e-4", "--stop", "\n\n", "-ed", '{"t": "x.jsonl"}', "-s", "", "--wandb", "-topk", "5")
    config = parse(argv)[0]
    path = make_run_dir(config).run_dir / "config.yaml"
    assert parse(["--config", str(path)])[0] == config


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--run-dir .*/file/run: cannot be created: Not a directory"):
        paths_of("--run-dir", "file/run")
