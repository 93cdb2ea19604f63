"""Test `coati-rl doctor RUN` on recorded runs, and on directories that are broken, running or of something else.

tests/data/doctor_runs has what scripts/bench/doctor_record.py copied of runs that scripts/bench/doctor_matrix.py made.
"""

import errno
import fcntl
import json
import os
import re
import shutil
from pathlib import Path

import make_doctor_page
import pytest

from coati_rl.command_line import main
from coati_rl.config.commands import ALL
from coati_rl.config.fields import spelling
from coati_rl.doctor import run_data
from coati_rl.doctor.diagnosis import RULES
from coati_rl.doctor.run_data import read_run
from coati_rl.errors import ConfigError
from coati_rl.run_reader.run_directory import RunDirectory

RUNS = Path(__file__).parents[2] / "data" / "doctor_runs"


def causes_of(directory, capsys):
    """The causes that the command names, in order, and its exit code."""
    code = main(["doctor", str(directory), "--json"])
    return [each["cause"] for each in json.loads(capsys.readouterr().out)["findings"]], code


@pytest.mark.parametrize("name", sorted(path.name for path in RUNS.iterdir()))
def test_the_cause_of_a_recorded_run_is_named_first_and_a_healthy_one_has_none(name, capsys):
    causes, code = causes_of(RUNS / name, capsys)
    assert causes[:1] == ([] if name == "healthy" else [name])
    assert code == int(name != "healthy")


def test_evidence_cause_and_remedy_are_told_and_a_consequence_says_what_it_follows_from(capsys):
    assert main(["doctor", str(RUNS / "truncation")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "1. responses are cut before they end [truncation]",
        "   evidence: 100% of responses are cut at --max-new-tokens 6 in the first steps, 100% in the last",
        f"   remedy:   {next(rule.remedy for rule in RULES if rule.cause == 'truncation')}",
    ]
    assert "[groups_equal] (follows from reward_never_right, truncation)" in "\n".join(lines)
    assert main(["doctor", str(RUNS / "healthy")]) == 0
    assert capsys.readouterr().out == "nothing found in 12 steps (not running)\n"


@pytest.fixture
def copied(tmp_path):
    """A recorded run's directory, to be changed."""

    def copy(name):
        return Path(shutil.copytree(RUNS / name, tmp_path / name))

    return copy


def test_nothing_in_the_directory_is_written_or_locked(copied, capsys):
    run = copied("stale_weights")
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert causes_of(run, capsys)[0][0] == "stale_weights"
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before


def test_a_run_that_was_killed_is_told_from_one_that_goes_on(copied, capsys):
    run = copied("healthy")
    log = run / "logs" / "driver.log"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if "minutes: " not in line))
    assert causes_of(run, capsys)[0] == ["driver_killed"]
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert causes_of(run, capsys) == ([], 0)


def test_lines_that_are_cut_off_or_damaged_are_left_out(copied, capsys):
    run = copied("truncation")
    for path in run.rglob("*.jsonl"):
        lines = path.read_bytes().splitlines(True)
        path.write_bytes(b"".join([lines[0], b'{"step": 1, \xff\n', b"[1]\n", b"\n", *lines[1:], lines[-1][:40]]))
    assert causes_of(run, capsys)[0][0] == "truncation"


def test_a_run_that_has_not_begun_has_no_finding(copied, capsys):
    run = copied("healthy")
    for name in ("rollouts", "timeline", "eval", "logs"):
        shutil.rmtree(run / name)
    (run / "metrics.jsonl").unlink()
    assert causes_of(run, capsys) == ([], 0)


def test_of_large_files_of_rollouts_the_first_and_the_last_lines_are_read(copied, monkeypatch):
    run = copied("healthy")
    (path,) = (run / "rollouts").iterdir()
    lines = path.read_bytes().splitlines(True)
    monkeypatch.setattr(run_data, "EXCERPT_BYTES", len(b"".join(lines[:3])) + 10)
    read = read_run(run)
    assert [each.line for each in read.first_rollouts] == [json.loads(line) for line in lines[:3]]
    assert [each.line for each in read.last_rollouts] == [
        json.loads(line) for line in lines[-len(read.last_rollouts) :]
    ]
    assert 0 < len(read.last_rollouts) < len(lines)


def test_hostile_text_of_a_run_is_escaped(copied, capsys):
    run = copied("truncation")
    (path,) = (run / "rollouts").iterdir()
    rows = [json.loads(line) | {"detail": "\x1b[2J\u202e"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["doctor", str(run)]) == 1
    shown = capsys.readouterr().out
    assert {each for each in shown if not each.isprintable()} == {"\n"}
    assert r"\x1b[2J" in shown


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "has no config.yaml; give the directory of a run" in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_run(tmp_path)


def test_what_another_user_may_not_read_is_unknown_or_refused_in_a_line(copied, capsys, monkeypatch):
    run = copied("truncation")
    config = (run / "config.yaml").read_text()
    unreadable = "x" * 300  # as little as a directory of another user can it be looked into
    for name in ("model: tiny", "dataset: train.jsonl", "held_out: eval.jsonl"):
        config = config.replace(name, f"{name.split(':')[0]}: {unreadable}.jsonl")
    (run / "config.yaml").write_text(config)
    assert causes_of(run, capsys)[0][0] == "truncation"

    def refused(self):
        raise PermissionError(errno.EACCES, "Permission denied", "syncs.jsonl")

    monkeypatch.setattr(RunDirectory, "syncs", refused)
    assert main(["doctor", str(run)]) == 2
    assert capsys.readouterr().err == (
        "coati-rl doctor: syncs.jsonl: cannot be read: Permission denied; read the run as the user who started it\n"
    )


def test_a_run_is_read_in_a_second(copied):
    started = os.times().user
    read_run(copied("healthy"))
    assert os.times().user - started < 1


def test_flags_that_remedies_name_exist():
    fields = [(name, field) for config in ALL.values() for name, field in config.fields().items()]
    flags = {spelling(name, field).replace("_", "-") for name, field in fields} | {"--dry-run", "--type"}
    texts = [f"{rule.remedy} {rule.says} {rule.find.__doc__}" for rule in RULES]
    named = {flag for text in texts for flag in re.findall(r"--[a-z][\w-]*", text)}
    assert len(named) > 20 and named <= flags


def test_the_page_has_the_rules_as_they_are(monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_doctor_page.py", "--check"])
    assert make_doctor_page.main() == 0, "python scripts/make_doctor_page.py writes docs/doctor.md"
