"""Test that a run reports every reason for waiting on the terminal, within 5 s of its last line."""

import json
import time

import pytest

pytestmark = pytest.mark.full

WITHIN_S = 5.0
REWARD = """
import os, time
from pathlib import Path

def score(response, ground_truth):
    cue = Path({cues!r}) / ("evaluation" if ground_truth == "7" else "last")
    if cue.exists():
        try:
            os.close(os.open(cue.with_suffix(".held"), os.O_CREAT | os.O_EXCL))  # by one response alone
        except FileExistsError:
            return float(len(response) % 2)
        while cue.exists():
            time.sleep(0.1)
    return float(len(response) % 2)
"""
LOSS = """
import time
from pathlib import Path

def policy_loss(logprobs, old_logprobs, advantages, micro_batch):
    cue = Path({cues!r}) / "loss"
    if cue.exists():
        cue.with_suffix(".held").touch()
    while cue.exists():
        time.sleep(0.1)
    return -(logprobs - old_logprobs).exp() * advantages
"""


class Watcher:
    """Looks at a run's output, and knows when each line came."""

    def __init__(self, run):
        self._run = run
        self._lines = []  # (time, line)
        self._num_read = 0  # up to the last line that was found

    def until(self, text, *, timeout_s=60):
        """The next line with the text, and the seconds since the line before it."""
        deadline = time.monotonic() + timeout_s
        while True:
            lines, now = self._run.text().split("\n")[:-1], time.monotonic()
            self._lines += [(now, line) for line in lines[len(self._lines) :]]
            for number in range(self._num_read, len(self._lines)):
                if text in self._lines[number][1]:
                    self._num_read = number + 1
                    return self._lines[number][1], self._lines[number][0] - self._lines[max(0, number - 1)][0]
            assert self._run.process.poll() is None, self._run.text()
            assert now < deadline, f"no '{text}':\n{self._run.text()}"
            time.sleep(0.05)


def test_a_run_that_waits_for_each_thing_says_so_within_five_seconds(make_tiny, start_run, flags, tmp_path):
    # 2 producers x 2 prompts, 4 a step, K = 1, 16 prompts: 4 steps. What makes it wait next is there before it goes on.
    model, cues = make_tiny(tied=True), tmp_path / "cues"
    cues.mkdir()
    rows = (model / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(rows[:16]))
    evaluation = [{**json.loads(row), "gt_answer": "7"} for row in rows[16:19]]
    (tmp_path / "eval.jsonl").write_text("\n".join(json.dumps(row) for row in evaluation))
    for name, text in (("reward", REWARD), ("loss", LOSS)):
        (tmp_path / f"{name}.py").write_text(text.format(cues=str(cues)))
    (cues / "evaluation").touch()

    functions = ["-rt", f"{tmp_path}/reward.py:score", "--policy-loss", f"{tmp_path}/loss.py:policy_loss"]
    data = ["-d", tmp_path / "train.jsonl", "-ed", json.dumps({"math": str(tmp_path / "eval.jsonl")}), "-ei", 100]
    job = [
        *flags(model, inferencers=2, prompts=2),
        *functions,
        *data,
        "-b",
        "fake",
        "--heartbeat-timeout-s",
        10,
        "--reward-workers",
        2,
    ]
    run = start_run(*job, stagings={"0@2": "SIGSTOP", "1@2": "SIGSTOP"})
    watcher, waits = Watcher(run), {}

    line, waits["evaluation"] = watcher.until("waiting for the evaluation at step 0: ")
    assert "2 of 3 prompts are answered" in line
    (cues / "evaluation").unlink()

    line, waits["sync"] = watcher.until("waiting for the transfer of version 2 to producers 0, 1")
    line, waits["replacement"] = watcher.until("waiting for a replacement of producer")
    assert "for the weight sync to version 2" in line and "producer 0 lost: " in run.text()

    (cues / "loss").touch()

    line, _ = watcher.until("no free slots: all 4 are taken")
    waits["slots"] = time.time() - (cues / "loss.held").stat().st_mtime
    assert "step 3 is being trained; " in line
    (cues / "last").touch()
    (cues / "loss").unlink()

    line, waits["prompts"] = watcher.until(": no prompts are left: all 16 were drawn")
    assert "waiting for rollouts: 3 of 4 groups of step 4 are finished, 1 prompt is being sampled by 1 producer" in line
    (cues / "last").unlink()

    assert run.wait() == 0, run.text()
    assert [record["step"] for record in run.records()] == [1, 2, 3, 4]
    assert all(seconds < WITHIN_S for seconds in waits.values()), waits
    assert all(reason in run.log("driver") for reason in ("waiting for the evaluation", "no free slots", "no prompts"))
    assert run.left_over() == []
