"""Test that the last line of a run says how to resume it, wherever its checkpoints are."""

import json
import shlex
import sys
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from coati_rl.processes.exit_messages import RunNote, command_here, read_note, write_note


@pytest.fixture
def make_checkpoint():
    def make(directory, *, bytes=2):
        directory.mkdir(parents=True)
        (directory / "state.json").write_text("{}")
        manifest = {"files": {"state.json": {"bytes": bytes, "xxh3_128": ""}}}
        (directory / "manifest.json").write_text(json.dumps(manifest))

    return make


def command(run_dir, source):
    return f"python rl_example.py --config {run_dir}/config.yaml -cp {source}"


def test_before_there_is_a_run_directory_nothing_is_said(tmp_path):
    assert read_note(tmp_path) == RunNote()
    assert RunNote().how_to_resume() == ""


def test_a_run_goes_on_from_its_newest_complete_checkpoint(tmp_path, make_checkpoint):
    run = tmp_path / "run"
    note = RunNote(run_dir=run, checkpoints=run / "checkpoints", grace_s=3.0)
    assert note.how_to_resume() == "; no checkpoint was written: start it again"
    for step in (9, 10):
        make_checkpoint(run / f"checkpoints/step-{step}")
    make_checkpoint(run / "checkpoints/step-11", bytes=3)  # a file is cut off
    write_note(tmp_path, note)
    assert read_note(tmp_path) == note
    assert note.how_to_resume() == f"; resume from step 10 with: {command(run, run)}"
    assert note.how_to_train_on() == f"; to train on, raise --num-episodes or --max-steps: {command(run, run)}"


def test_checkpoints_elsewhere_are_named_themselves(tmp_path, make_checkpoint):
    make_checkpoint(tmp_path / "model/step-10")
    note = RunNote(run_dir=tmp_path / "run", checkpoints=tmp_path / "model")
    assert note.how_to_resume() == f"; resume from step 10 with: {command(tmp_path / 'run', tmp_path / 'model')}"


def test_before_its_first_checkpoint_a_resumed_run_is_resumed_from_where_it_was(tmp_path):
    old = tmp_path / "old/checkpoints/step-10"
    note = RunNote(run_dir=tmp_path / "run", checkpoints=tmp_path / "run/checkpoints", resumed_from=old)
    assert note.how_to_resume() == f"; resume from step 10 with: {command(tmp_path / 'run', old)}"


def test_a_full_temporary_directory_is_told(tmp_path):
    (tmp_path / "run.json").symlink_to("/dev/full")
    with pytest.raises(ConfigError, match=r"run.json cannot be written: No space left on device; .* or set TMPDIR to"):
        write_note(tmp_path, RunNote(run_dir=Path("run")))


@pytest.fixture
def typed(tmp_path, monkeypatch):
    """(argv[0], is the environment activated) -> the command of a run that was started like that in `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    environment = tmp_path / "my venv/bin"
    environment.mkdir(parents=True)
    for name in ("python", "coati-rl"):
        (environment / name).touch(mode=0o755)

    def of(program, command="python rl_example.py", *, is_active):
        monkeypatch.setattr(sys, "argv", [program, "-m", "model"])
        monkeypatch.setattr(sys, "executable", str(environment / "python"))
        monkeypatch.setenv("PATH", str(environment) if is_active else "/nowhere")
        return shlex.split(command_here(command))

    return of


def test_a_script_is_named_by_its_absolute_path_and_an_interpreter_that_no_shell_finds_by_its_own(typed, tmp_path):
    script = str(tmp_path / "a clone/rl_example.py")
    assert typed("a clone/rl_example.py", is_active=True) == ["python", script]
    assert typed(script, is_active=False) == [str(tmp_path / "my venv/bin/python"), script]


def test_an_installed_command_is_printed_as_it_was_typed(typed, tmp_path):
    program = str(tmp_path / "my venv/bin/coati-rl")
    assert typed(program, is_active=True) == ["coati-rl", "rl"]
    assert typed(program, "coati-rl sft", is_active=True) == ["coati-rl", "sft"]
    assert typed(program, "coati-rl sft", is_active=False) == [program, "sft"]
    assert typed("/a/clone/consumer/__main__.py", "coati-rl dpo", is_active=True) == ["python", "-m", "consumer", "dpo"]
    assert typed("/usr/bin/pytest", "coati-rl sft", is_active=True) == ["coati-rl", "sft"], "started by other code"
