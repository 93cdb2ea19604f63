"""Test batch inference as a command with real engines: an interruption, going on, rows for other jobs, nothing left."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import rl_generate

ROOT = Path(__file__).parents[3]
PATIENCE_S = 240.0
SMALL = ["--device", "cpu", "-rt", "boxed", "-g", "4", "-mnt", "16", "-mpt", "128"]


@pytest.fixture
def command(make_tiny, tmp_path):
    """Flags -> the command on 24 prompts of the tiny model, as a list of arguments."""
    model = make_tiny(tied=True)
    prompts = tmp_path / "prompts.jsonl"
    lines = (model / "train.jsonl").read_text().splitlines()[:24]
    prompts.write_text("".join(line + "\n" for line in lines))
    fixed = ["-m", str(model), "-d", str(prompts), "-o", str(tmp_path / "out.jsonl"), *SMALL]
    return lambda *flags: [sys.executable, str(ROOT / "rl_generate.py"), *fixed, *flags]


def rows_in(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().split("\n")[:-1]]


def run(command):
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)


def interrupted_in_the_middle(command, output):
    """Send Ctrl-C's signal once rows are written; returns what it printed and the processes that were below it."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while not (output.exists() and output.stat().st_size) and process.poll() is None:
        assert time.monotonic() < deadline, "no row was written"
        time.sleep(0.01)
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=PATIENCE_S)
    return process.returncode, printed, below


@pytest.mark.full
def test_an_interrupted_command_goes_on_and_leaves_no_process(command, tmp_path, monkeypatch, capsys):
    one_at_a_time = ["-b", "transformers", "-imbs", "1"]
    code, printed, below = interrupted_in_the_middle(command(*one_at_a_time), tmp_path / "out.jsonl")
    assert code == 130, printed
    assert "interrupted; the same command goes on" in printed
    assert below and not [process for process in below if process.is_running()]
    num_before = len(rows_in(tmp_path))
    monkeypatch.setattr(os, "environ", os.environ.copy())  # the command sets variables of its engine
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    again = command("-b", "transformers", "-imbs", "24")[2:]
    assert rl_generate.main(again, tmp_path) == 0, "in this process, which has imported torch"
    printed = capsys.readouterr()
    assert "prompts: going on" in printed.err
    rows = rows_in(tmp_path)
    assert num_before < len(rows) == 96
    assert [(row["uid"], row["sample"]) for row in rows] == [
        (f"train-{n}", each) for n in range(24) for each in range(4)
    ]
    assert {row["verdict"] for row in rows} == {"ok", "wrong"}, "the model guesses among three answers"
    figures = json.loads(printed.out.strip().partition("out.jsonl: ")[2])
    assert figures["accuracy"] == sum(row["answer_correct"] for row in rows) / 96
    assert figures["pass@1"] <= figures["pass@2"] <= figures["pass@4"]


@pytest.mark.full
def test_vllm_makes_pairs_that_the_jobs_on_preferences_read(command, tmp_path):
    done = run(command("-b", "vllm", "--pairs"))
    assert done.returncode == 0, done.stderr
    rows = rows_in(tmp_path)
    assert rows and {(row["chosen_reward"], row["rejected_reward"]) for row in rows} == {(1.0, 0.0)}
    job = [sys.executable, "-m", "consumer", "dpo", *command()[2:4], "-d", str(tmp_path / "out.jsonl"), "-tbs", "4"]
    plan = run([*job, "--dry-run"])
    assert plan.returncode == 0, plan.stderr
