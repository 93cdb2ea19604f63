"""Test the command that a rehearsal runs: its own message comes back."""

import time

import pytest

from coati_rl.errors import ConfigError, RunError
from coati_rl.rehearsal.command_run import CommandRun


@pytest.fixture
def command(tmp_path):
    config = tmp_path / "rehearsal.yaml"
    names = {str(tmp_path / "model-0"): "/models/large"}
    return CommandRun(job="sft", config=config, log=tmp_path / "log", names=names, temporary=str(tmp_path))


@pytest.mark.full
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
