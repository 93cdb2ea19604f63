"""Test which texts are taken for paths: ~ is expanded, and what can be no path is refused with its flag."""

import pytest

from coati_rl.config.absolute_paths import with_absolute_paths
from coati_rl.config.cli import parse
from coati_rl.config.named_paths import read_sources
from coati_rl.errors import ConfigError

TOO_LONG = "x" * 300
PATHS = {
    "-m": "model",
    "--run-dir": "run_dir",
    "--save-dir": "save_dir",
    "--eval-save-dir": "eval_save_dir",
    "--rollout-save-dir": "rollout_save_dir",
    "--checkpoint-path": "checkpoint_path",
    "--ray_dir": "ray_dir",
    "--adapter": "adapter",
    "--teacher": "teacher",
}


@pytest.mark.parametrize(("flag", "field"), PATHS.items())
def test_a_path_may_begin_with_the_home(tmp_path, monkeypatch, flag, field):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert parse([f"{flag}=~/a b/ü"])[0].values()[field] == f"{tmp_path}/a b/ü"


@pytest.mark.parametrize("flag", [*PATHS, "-d", "-ed", "--chat-template"])
@pytest.mark.parametrize("path", [TOO_LONG, "~no-such-user/x"])
def test_what_can_be_no_path_is_refused_with_its_flag(flag, path):
    with pytest.raises(ConfigError, match=r"^--.*(too long|home directory|neither a file)"):
        parse([flag, f"held-out={path}" if flag == "-ed" else path])


@pytest.mark.parametrize("name", ["", ".", "..", "/tmp/run", "a/../../b", TOO_LONG])
def test_a_project_has_its_directory_below_runs(name):
    with pytest.raises(ConfigError, match=r"^--project.*(below runs/.*--run-dir|empty|too long)"):
        parse(["-p", name])
    assert parse(["-p", "team/run 1"])[0].run.project == "team/run 1"


@pytest.mark.parametrize("flag", [*PATHS, "-d", "--chat-template"])
def test_an_empty_text_is_not_the_working_directory(flag):
    with pytest.raises(ConfigError, match=r"^--.* '': .*(empty|neither a file)"):
        parse([flag, ""])


def test_texts_that_are_longer_than_a_path_are_read_as_several_or_as_none():
    sources = ",".join(f"{'a' * 20}{number}.jsonl=1" for number in range(20))
    assert len(read_sources(parse(["-d", sources])[0].data.dataset)) == 20
    generator = f"reasoning_gym:chain_sum?{'&'.join(f'parameter_{number}=1' for number in range(30))}"
    assert parse(["-d", generator])[0].data.is_endless
    assert parse(["--agent-command", f"agent {TOO_LONG}"])[0].environment.agent_command == f"agent {TOO_LONG}"


def test_sources_below_the_home_are_stored_with_their_shares(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.jsonl").touch()
    stored = with_absolute_paths({"dataset": "~/a.jsonl=1,owner/name=2"})
    assert stored["dataset"] == f"{tmp_path}/a.jsonl=1,owner/name=2"
