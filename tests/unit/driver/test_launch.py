"""Test which events become records, and where they go."""

import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from coati_rl.config import Config
from coati_rl.driver import launch
from coati_rl.driver.command import plan_or_launch
from coati_rl.driver.launch import _driver_log, _record, _report_data_ended, _with_timeline_event
from coati_rl.errors import RunError
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
        deadline = time.monotonic() + 20
        with pytest.raises(RunError, match=f"{tmp_path / full} cannot be written: No space left on device; free space"):
            while time.monotonic() < deadline:
                assert _with_timeline_event(event, timeline, log) == event
                time.sleep(0.05)
    assert capsys.readouterr().err == "", "logging prints a traceback of its own, unless told not to"


class Notes:
    """A sink and a display at once."""

    def __init__(self):
        self.written = []
        self.shown = []

    def write(self, step, record):
        self.written.append((step, record))

    def show(self, event):
        self.shown.append(event)


HOST_METRICS = ("memory_available_gib", "disk_free_gib")


def recorded(event, run_dir=Path("/")):
    """Return the records of an event in metrics.jsonl, TensorBoard and syncs.jsonl."""
    display, jsonl, tensorboard, syncs = Notes(), Notes(), Notes(), Notes()
    _record(event, display, [jsonl, tensorboard], syncs, run_dir)
    assert len(display.shown) == 1
    return jsonl.written, tensorboard.written, syncs.written


def test_a_step_is_the_same_record_in_every_sink():
    jsonl, tensorboard, syncs = recorded({"event": "step", "step": 3, "loss": 0.5})
    assert jsonl == tensorboard
    assert syncs == []
    ((step, record),) = jsonl
    assert (step, record) == (3, {"step": 3, "loss": 0.5} | {name: record[name] for name in HOST_METRICS})
    assert all(record[name] > 0 for name in HOST_METRICS)


def test_what_the_machine_has_left_is_unknown_where_its_disk_does_not_say(tmp_path, monkeypatch):
    monkeypatch.setattr("coati_rl.driver.host_metrics.free_bytes", lambda path: (_ for _ in ()).throw(OSError("stale")))
    jsonl, *_ = recorded({"event": "step", "step": 3}, tmp_path)
    assert jsonl[0][1]["disk_free_gib"] is None


@pytest.mark.parametrize(
    ("error", "line"),
    [(RunError("trainer-0 died"), "the run failed: trainer-0 died"), (KeyboardInterrupt(), "interrupted")],
)
def test_what_ends_a_run_is_the_last_line_of_its_log(tmp_path, error, line):
    with pytest.raises(type(error)), _driver_log(tmp_path / "driver.log"):
        raise error
    assert (tmp_path / "driver.log").read_text().splitlines()[-1].endswith(f"coati_rl.driver.launch: {line}")


def test_an_evaluation_is_a_curve_but_no_line_of_metrics_jsonl():
    jsonl, tensorboard, syncs = recorded({"event": "evaluation", "step": 4, "task": "math", "accuracy": 0.75})
    assert jsonl == syncs == []
    assert tensorboard == [(4, {"eval/math/accuracy": 0.75})]


def test_a_weight_sync_is_a_line_of_syncs_jsonl():
    details = {"producers": [0, 2], "seconds": 0.5, "digest": "a1", "identity": "b2", "bytes": 640}
    details |= {"commit_s": 0.02, "probe_gap_mean": 1e-7, "probe_gap_max": 3e-7}
    jsonl, tensorboard, syncs = recorded({"event": "sync", "policy_version": 4, **details})
    assert jsonl == tensorboard == []
    assert syncs == [(4, {"step": 4, **details})]


def test_other_events_are_shown_only():
    assert recorded({"event": "checkpoint", "step": 4, "path": "p"}) == ([], [], [])


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
