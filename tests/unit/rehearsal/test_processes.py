"""Test the processes of a rehearsal: calls with a deadline, and a command whose own message comes back."""

import os
import time

import pytest

from coati_rl.errors import ConfigError, RunError
from coati_rl.rehearsal.command_run import CommandRun
from coati_rl.rehearsal.worker import Worker


class Subject:
    """Do what a test asks."""

    def __init__(self):
        self.calls = 0

    def count(self, number):
        self.calls += number
        return self.calls

    def refuse(self):
        raise ConfigError("--model x: no such directory")

    def fail(self):
        return {}["missing"]

    def sleep(self):
        time.sleep(60)

    def end(self):
        os._exit(1)


@pytest.fixture
def worker(tmp_path):
    made = Worker(Subject, tmp_path / "log")
    yield made
    made.close()


def test_an_object_stays_in_its_process_between_calls(worker):
    assert worker.call("count", 2, timeout_s=20, what="counting") == 2
    assert worker.call("count", 3, timeout_s=20, what="counting") == 5


def test_a_refusal_comes_back_as_it_is_and_any_other_error_with_its_type(worker, tmp_path):
    with pytest.raises(ConfigError, match="--model x: no such directory"):
        worker.call("refuse", timeout_s=20, what="it")
    with pytest.raises(RunError, match="KeyError: 'missing'"):
        worker.call("fail", timeout_s=20, what="it")
    assert "Traceback" in (tmp_path / "log").read_text()


def test_a_call_that_hangs_or_ends_its_process_is_named(worker, tmp_path):
    with pytest.raises(RunError, match=r"asleep: did not end within 0 s"):
        worker.call("sleep", timeout_s=0.2, what="asleep")
    other = Worker(Subject, tmp_path / "other")
    with pytest.raises(RunError, match="counting: its process has ended"):
        other.call("end", timeout_s=20, what="counting")
    other.close()


@pytest.fixture
def command(tmp_path):
    config = tmp_path / "rehearsal.yaml"
    names = {str(tmp_path / "model-0"): "/models/large"}
    return CommandRun(job="sft", config=config, log=tmp_path / "log", names=names, temporary=str(tmp_path))


def test_a_refused_command_gives_its_message_with_the_users_names(command, tmp_path):
    command.config.write_text(f"model: {tmp_path / 'model-0'}\ndataset: {tmp_path / 'none.jsonl'}\nmax_length: 1\n")
    with pytest.raises(ConfigError, match=r"^--max-length 1: Input should be greater than or equal to 2"):
        command.run(timeout_s=60)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("coati-rl sft: warning: w\ncoati-rl sft: -t 3: a\ncoati-rl sft: -e 0: b\n", "-t 3: a\n-e 0: b"),
        (
            "step 1\nrl_example.py: the run failed: producer-0 failed: no (logs: /x/logs); no checkpoint was written: "
            "start it again\n",
            "producer-0 failed: no",
        ),
        ("rl_example.py: the run failed: x; resume from step 1 with: python ...\n", "x"),
        ("", "it has said nothing"),
    ],
)
def test_the_message_is_the_last_lines_of_the_program_without_advice_on_removed_files(command, text, message):
    command.log.write_text(text)
    assert command.message() == message


def test_a_command_that_does_not_end_is_ended_and_its_last_line_is_told(command):
    command.config.write_text("")
    begin = time.monotonic()
    with pytest.raises(RunError, match="did not end within 0 s"):
        command.run(timeout_s=0.1)
    assert time.monotonic() - begin < 30
