"""Test what ends a run, and what is said of one that ends early."""

import io
import json
import logging
import os
import time
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from coati_rl.checkpoint.ledger_resume import state_record
from coati_rl.checkpoint.ledger_writer import LedgerWriter
from coati_rl.config import Config
from coati_rl.coordinator.state_json import to_json
from coati_rl.driver import launch
from coati_rl.driver.command import plan_or_launch
from coati_rl.driver.launch import _driver_log, _records, _report_data_ended, _with_timeline_event
from coati_rl.errors import ConfigError, RunError
from coati_rl.observability.timeline import Timeline
from coati_rl.preflight.prepared import PreparedJob


@pytest.mark.parametrize("full", ["timeline/driver.jsonl", "logs/driver.log"])
def test_a_full_disk_under_timeline_or_log_ends_the_run_with_the_next_event(tmp_path, full, capsys):
    for name in ("timeline", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / full).symlink_to("/dev/full")
    event = {"event": "checkpoint", "step": 1, "path": "p"}
    with (
        _driver_log(tmp_path / "logs/driver.log") as log,
        closing(Timeline(tmp_path / "timeline", "driver")) as timeline,
    ):
        launch.logger.info("begins")
        deadline = time.monotonic() + 60
        with pytest.raises(RunError, match=f"{tmp_path / full} cannot be written: No space left on device; free space"):
            while time.monotonic() < deadline:
                assert _with_timeline_event(event, timeline, log) == event
                time.sleep(0.05)
    assert capsys.readouterr().err == "", "logging prints a traceback of its own, unless told not to"


@pytest.mark.parametrize(
    ("error", "line"),
    [(RunError("trainer-0 died"), "the run failed: trainer-0 died"), (KeyboardInterrupt(), "interrupted")],
)
def test_what_ends_a_run_is_the_last_line_of_its_log(tmp_path, error, line):
    with pytest.raises(type(error)), _driver_log(tmp_path / "driver.log"):
        raise error
    assert (tmp_path / "driver.log").read_text().splitlines()[-1].endswith(f"coati_rl.driver.launch: {line}")


def test_the_log_is_utf_8_and_holds_what_is_no_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger("coati_rl"), "propagate", False)  # pytest could not send the line it captures
    with _driver_log(tmp_path / "driver.log"):
        launch.logger.info("Zürich \ud83d")
    assert "Zürich \\ud83d" in (tmp_path / "driver.log").read_text(encoding="utf-8")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("wanted", "taken", "line"),
    [
        (40, 32, "the run ended at step 32 of --max-steps 40: the data is used up; raise --num-episodes (-e)"),
        (32, 32, ""),
        (None, 32, ""),
        (40, None, ""),  # resumed from its last step
    ],
)
def test_a_run_that_takes_fewer_steps_than_wanted_says_why(wanted, taken, line):
    shown = []
    display = SimpleNamespace(last_step=taken, print_line=shown.append)
    _report_data_ended(Config(model="model", max_steps=wanted), display)
    assert shown == [line] * bool(line)


def test_it_is_a_warning_before_anything_starts(tmp_path, capsys):
    config = Config(model="model", max_steps=40)
    plan = SimpleNamespace(num_steps=32, precision="fp32", lines=lambda: ["optimizer steps         32"])
    prepared = PreparedJob(config=config, plan=plan, warnings=())
    plan_or_launch(prepared, lambda: None, warnings=["one"], is_dry_run=True, scratch=tmp_path)
    assert capsys.readouterr().err == (
        "rl_example.py: warning: one\n"
        "rl_example.py: warning: --max-steps 40: the data ends after 32; raise --num-episodes (-e)\n"
    )


def test_a_temporary_directory_that_is_too_long_for_ray_is_refused_before_there_is_a_run_directory(tmp_path):
    config = Config(model="model", run_dir=str(tmp_path / "run"))
    prepared = PreparedJob(config=config, plan=SimpleNamespace(num_steps=32), warnings=())
    long = Path("/") / ("t" * 25) / "coati-12345678"
    with pytest.raises(ConfigError, match=r"TMPDIR /t+: too long for the paths of Ray's sockets"):
        plan_or_launch(prepared, lambda: pytest.fail("Ray is imported"), warnings=[], is_dry_run=False, scratch=long)


@pytest.mark.parametrize("error", [None, RunError("x"), KeyboardInterrupt()], ids=["whole", "failed", "interrupted"])
def test_sinks_are_closed_as_those_of_a_run_that_has_failed_unless_it_came_to_its_end(tmp_path, monkeypatch, error):
    closed = []
    sink = SimpleNamespace(close=lambda *, has_failed: closed.append(has_failed))
    monkeypatch.setattr(launch, "open_sinks", lambda *_, first_step: [sink])
    with (
        pytest.raises(type(error)) if error else nullcontext(),
        _records(Config(model="model"), tmp_path, first_step=0),
    ):
        if error:
            raise error
    assert closed == [error is not None]


def test_a_plan_whose_pipe_is_closed_ends_without_a_traceback(tmp_path, monkeypatch):
    reading, writing = os.pipe()
    os.close(reading)  # as of `--dry-run | head -1`
    plan = SimpleNamespace(num_steps=32, precision="fp32", lines=lambda: ["optimizer steps         32"])
    prepared = PreparedJob(config=Config(model="model"), plan=plan, warnings=())
    with io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True) as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        plan_or_launch(prepared, lambda: None, warnings=[], is_dry_run=True, scratch=tmp_path)
        with pytest.raises(BrokenPipeError):
            pipe.write("nobody reads this")


def test_a_resumed_run_writes_once_what_the_driver_that_was_killed_had_not_read(tmp_path):
    steps = [{"event": "step", "step": step, "loss": step / 8} for step in (3, 4, 5, 6)]
    syncs = [{"event": "sync", "policy_version": version, "producers": [0]} for version in (3, 4)]
    others = [{"event": "gap", "cause": "x"}, {"event": "evaluation", "step": 4, "task": "t", "metrics": {"acc": 0.5}}]
    events = [steps[0], syncs[0], *others, steps[1], syncs[1]]
    rest = {step["step"]: {"step": step["step"], "loss": step["loss"]} for step in steps[2:]}
    state = {"run": {"unwritten": rest}, "events": {"_events": events, "_num_acknowledged": 7}}
    ledger = LedgerWriter(tmp_path / "ledger")
    ledger.begin([state_record(to_json(state, {}), ()).to_bytes], is_start=True)
    ledger.flush(timeout_s=10)
    for name in ("metrics", "syncs"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3)))
    written = []
    launch._write_unread(5, SimpleNamespace(write=written.append), tmp_path)
    assert written == [others[1], steps[1], syncs[1], steps[2]], "those up to the checkpoint, not in the files"
    launch._write_unread(5, SimpleNamespace(write=written.append), tmp_path / "another")
    assert len(written) == 4, "another directory has no ledger of the run"


def test_a_run_goes_on_without_the_records_of_a_damaged_ledger_which_its_log_says(tmp_path, caplog):
    ledger = LedgerWriter(tmp_path / "ledger")
    ledger.begin([state_record({}, ()).to_bytes], is_start=True)
    ledger.flush(timeout_s=10)
    ledger.append(state_record({}, ()).to_bytes)
    ledger.flush(timeout_s=10)
    (segment,) = (tmp_path / "ledger").iterdir()
    content = bytearray(segment.read_bytes())
    content[40] ^= 1
    segment.write_bytes(content)
    launch._write_unread(5, SimpleNamespace(), tmp_path)
    (message,) = caplog.messages
    assert f"are not written: {segment}: frame 0" in message
