"""Test the commands that a run names at its end."""

import shlex

import pytest

from coati_rl.command_line import COMMANDS
from coati_rl.config import Config
from coati_rl.config.cli import build_job, parse_job
from coati_rl.config.commands import OFFLINE
from coati_rl.config.serve import ServeConfig
from coati_rl.driver import closing
from coati_rl.driver.closing import closing_lines
from coati_rl.processes.run_dir import RunPaths

REPORT = "report:     coati-rl report"


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """Those of a run whose directory has a space in its name, with a checkpoint of step 4 and rollouts."""
    monkeypatch.setattr(closing.shutil, "which", lambda name: f"/usr/bin/{name}")
    run = tmp_path / "my run"
    for part in ("checkpoints/step-4", "rollouts"):
        (run / part).mkdir(parents=True)
    monkeypatch.setattr(closing, "newest_complete", lambda checkpoints: next(checkpoints.glob("step-*"), None))
    names = ("checkpoints", "rollouts", "logs")
    return RunPaths(run_dir=run, evaluation=run / "eval", **{name: run / name for name in names})


def test_a_run_ends_with_its_checkpoint_and_the_commands_that_open_it(paths):
    run = shlex.quote(str(paths.run_dir))
    assert closing_lines(Config(model="m"), paths) == [
        f"checkpoint: {paths.checkpoints}/step-4",
        f"serve it:   coati-rl serve {shlex.quote(f'{paths.checkpoints}/step-4')}",
        f"rollouts:   coati-rl show {run}",
        f"report:     coati-rl report {run}",
    ]


def test_the_command_that_serves_is_one_that_can_be_typed(paths):
    _, command, *words = shlex.split(closing_lines(Config(model="m"), paths)[1].partition("   ")[2])
    assert command in COMMANDS
    config, _ = parse_job(["--model", *words], ServeConfig)
    assert config.model.model == f"{paths.checkpoints}/step-4"


def test_with_keep_best_it_is_the_best_checkpoint(paths):
    (paths.checkpoints / "best").symlink_to("step-4")
    assert closing_lines(Config(model="m"), paths)[0] == f"checkpoint: {paths.checkpoints}/best"


def test_a_run_without_a_checkpoint_or_rollouts_names_none(paths):
    (paths.checkpoints / "step-4").rmdir()
    paths.rollouts.rmdir()
    (line,) = closing_lines(Config(model="m"), paths)
    assert line.startswith(REPORT)


@pytest.mark.parametrize(("job", "is_served"), [("sft", True), ("dpo", True), ("rm", False), ("prm", False)])
def test_a_model_that_scores_is_not_served_as_one_that_answers(paths, job, is_served):
    lines = closing_lines(build_job({"model": "m"}, OFFLINE[job]), paths)
    assert any("coati-rl serve" in line for line in lines) is is_served


def test_where_no_shell_finds_coati_rl_the_command_of_this_environment_is_named(paths, monkeypatch, tmp_path):
    monkeypatch.setattr(closing.shutil, "which", lambda name: None)
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    monkeypatch.setattr(closing.sys, "executable", str(python))
    assert closing_lines(Config(model="m"), paths)[-1].split()[1:5] == [
        str(python),
        "-m",
        "coati_rl.command_line",
        "report",
    ]
    (tmp_path / "bin/coati-rl").touch()
    assert closing_lines(Config(model="m"), paths)[-1].split()[1:3] == [str(tmp_path / "bin/coati-rl"), "report"]
