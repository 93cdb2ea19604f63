"""Test that fields of what a person sees of a run reach it: the terminal, sampled answers, charts.

The part of a test's name before two underscores is the field (see test_flags.py).
"""

import json
import os
from types import SimpleNamespace

from coati_rl.driver import launch
from coati_rl.observability.sinks import open_sinks


def test_wandb__adds_a_sink(monkeypatch, config_with, tmp_path):
    monkeypatch.setattr("coati_rl.observability.sinks.WandbSink", lambda config, run_dir: "wandb")
    sinks = open_sinks(config_with(), tmp_path), open_sinks(config_with(wandb=True), tmp_path)
    assert [len(some) for some in sinks] == [2, 3]
    assert sinks[1][2] == "wandb"
    for sink in (*sinks[0], *sinks[1][:2]):
        sink.close()


def test_plain__writes_lines_at_a_terminal_too(monkeypatch, prepare_with, tmp_path):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    paths = SimpleNamespace(checkpoints=tmp_path, rollouts=tmp_path, run_dir=tmp_path)
    for plain in (False, True):
        master, slave = os.openpty()
        with open(slave, "w") as stream:
            monkeypatch.setattr(launch.sys, "stdout", stream)
            with launch._display(prepare_with(plain=plain), paths) as display:
                display.print_line("a line")
            stream.flush()
            written = os.read(master, 4096)
        os.close(master)
        assert (written == b"a line\r\n") is plain and b"a line\r\n" in written


def test_answer_interval__is_the_steps_between_answers_that_are_shown(prepare_with, tmp_path):
    answer = {"prompt": "1 + 1?", "response": "2", "gt_answer": "2", "reward": 1.0, "verdict": "ok"}
    paths = SimpleNamespace(rollouts=tmp_path)
    (tmp_path / "steps-000001-000100.jsonl").touch()
    for interval, expected in ((2, [1, 2, 4]), (-1, [])):
        reader, shown = launch._answers(prepare_with(answer_interval=interval).config, paths, 0), []
        for step in (1, 2, 3, 4):
            with (tmp_path / "steps-000001-000100.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, **answer}) + "\n")
            shown += [step] if reader.take(step) else []
        assert shown == expected
