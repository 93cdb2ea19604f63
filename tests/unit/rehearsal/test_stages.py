"""Test the record of a rehearsal: what is printed of each stage, the table, the exit code, the time for all."""

import json

import pytest

from coati_rl.errors import ConfigError, RunError
from coati_rl.rehearsal.stages import Stages


class Clock:
    """Return the seconds that a test has set."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def said():
    return []


@pytest.fixture
def stages(clock, said):
    return Stages(120.0, said.append, now=clock)


def test_a_stage_is_printed_with_its_seconds_and_warnings(stages, clock, said):
    with stages.stage("preparation") as stage:
        clock.seconds = 8.25
        stage.finding = "100 prompts"
        stage.warn(["2 rows are too long"])
    assert said == ["preparation    8.2 s  100 prompts", f"{'':<22}warning: 2 rows are too long"]
    assert [*stages.table()] == [
        "stage        seconds  outcome  finding",
        "preparation      8.2  warning  100 prompts",
        "total            8.2",
    ]
    assert stages.exit_code() == 0


@pytest.mark.parametrize(("error", "outcome", "code"), [(ConfigError, "refused", 2), (RunError, "failed", 1)])
def test_what_stops_the_command_is_recorded_with_the_exit_code_that_it_has(stages, said, error, outcome, code):
    with stages.stage("flags"):
        pass
    with pytest.raises(error), stages.stage("run"):
        raise error("-tp 3: must divide\nnearest: -tp 2")
    assert stages.exit_code() == code
    assert said[1].endswith(f"{outcome}: -tp 3: must divide; nearest: -tp 2")


def test_what_a_model_has_said_does_not_act_on_the_terminal(stages, said):
    with pytest.raises(RunError), stages.stage("rewards"):
        raise RunError("train-1: \x1b[2J\u202e")
    assert "\\x1b[2J\\u202e" in said[0] and "\x1b" not in said[0]


def test_past_the_time_for_all_stages_nothing_more_is_started(stages, clock):
    clock.seconds = 119.0
    assert stages.left_s() == 1.0
    clock.seconds = 120.0
    with pytest.raises(RunError, match="raise --limit-s 120"):
        stages.left_s()


def test_json_has_each_stage_and_the_exit_code(stages, capsys):
    with pytest.raises(ConfigError), stages.stage("flags"):
        raise ConfigError("unknown flag --x")
    stages.write_json(job="rl")
    found = json.loads(capsys.readouterr().out)
    assert (found["exit_code"], found["job"]) == (2, "rl")
    assert found["stages"][0] | {"seconds": 0} == {
        "name": "flags",
        "seconds": 0,
        "outcome": "refused",
        "finding": "",
        "warnings": [],
        "problem": "unknown flag --x",
    }
