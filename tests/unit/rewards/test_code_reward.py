"""Test how the code reward scores a response: missing programs and tests, and the outcomes of its runs."""

import json
import time

import pytest

from coati_rl.reward_spec import RewardSpec
from coati_rl.sandbox import Limits, Outcome, SandboxError
from coati_rl.types import Problem, Score
from rewards.code import code_reward
from rewards.code.code_reward import CodeReward

TESTS = '{"inputs": ["1"], "outputs": ["1"]}'


def score(response: str, ground_truth: str = TESTS) -> Score:
    (found,) = CodeReward(RewardSpec(reward_type="code")).score([response], Problem(ground_truth=ground_truth))
    return found


def test_a_response_without_a_program_is_wrong_and_has_no_format() -> None:
    found = score("The answer is 1.")
    assert (found.verdict, found.reward, found.format_valid) == ("wrong", 0.0, False)
    assert found.detail == "0 of 1 tests passed; no closed ```python fence"
    assert found.breakdown == {"tests_passed": 0.0}


@pytest.mark.parametrize(
    ("ground_truth", "detail"),
    [
        ("5", 'the tests 5 cannot be read: not {"inputs": [...], "outputs": [...]}'),
        ("", "the tests  cannot be read: Expecting value: line 1 column 1 (char 0)"),
        ('{"inputs": [], "outputs": []}', "give equally many, at least one"),
    ],
)
def test_tests_that_cannot_be_read_leave_a_response_undecided(ground_truth: str, detail: str) -> None:
    found = score("```python\nprint(1)\n```", ground_truth)
    assert found.verdict == "invalid"
    assert detail in found.detail


class ScriptedSandbox:
    """Gives the outcomes, or raises the errors, of a script instead of running anything."""

    def __init__(self, script: list[Outcome | Exception]) -> None:
        self.script = script

    def run(self, program: str, **_: object) -> Outcome:
        outcome = self.script.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


def outcome(output: bytes = b"1", **changes: object) -> Outcome:
    """A run that ended well."""
    times = {"cpu_s": 0.1, "wall_s": 0.1, "waited_s": 0.0}
    return Outcome(
        **{"end": "exit", "code": 0, "output": output, "error_output": b"", "returned": b"", **times, **changes}
    )


TWO_TESTS = '{"inputs": ["1", "2"], "outputs": ["1", "2"]}'
RIGHT = [outcome(b"1"), outcome(b"2")]


@pytest.mark.parametrize(
    ("script", "verdict", "passed", "detail"),
    [
        (RIGHT, "ok", 1.0, "2 of 2 tests passed"),
        ([outcome(b"1"), outcome(b"3")], "wrong", 0.5, "1 of 2 tests passed; test 2: expected '2', got '3'"),
        ([outcome(b"1", code=1), outcome(b"2")], "wrong", 0.5, "1 of 2 tests passed; test 1: exit code 1"),
        ([outcome(b"1", end="signal", code=11), outcome(b"2")], "wrong", 0.5, "test 1: killed by signal 11"),
        ([outcome(b"1", end="memory", code=9)], "wrong", 0.0, "test 1: more than 1024 MiB of memory"),
        ([outcome(b"1"), outcome(b"2", wall_s=1e3)], "wrong", 0.5, "test 2: all tests up to here took more than"),
        ([SandboxError("no supervisor"), *RIGHT], "ok", 1.0, "2 of 2 tests passed"),
    ],
    ids=["right", "wrong output", "exit code", "signal", "memory", "too slow", "sandbox failed once"],
)
def test_a_program_is_right_if_every_run_ends_well_with_the_expected_output(
    monkeypatch: pytest.MonkeyPatch, script: list[Outcome | Exception], verdict: str, passed: float, detail: str
) -> None:
    monkeypatch.setattr(code_reward, "Sandbox", lambda **_: ScriptedSandbox([*script]))
    found = score("```python\nprint(1)\n```", TWO_TESTS)
    assert (found.verdict, found.reward, found.format_valid) == (verdict, float(verdict == "ok"), True)
    assert found.breakdown == {"tests_passed": passed}
    assert detail in found.detail


@pytest.mark.parametrize(
    ("script", "detail"),
    [
        ([SandboxError("no supervisor")] * 2, "no supervisor"),
        ([outcome(b"1"), outcome(b"", end="starved", wall_s=30.0, waited_s=29.0)], "test 2: no end after 30 s"),
    ],
    ids=["sandbox failed twice", "starved"],
)
def test_what_says_nothing_of_the_program_leaves_it_undecided(
    monkeypatch: pytest.MonkeyPatch, script: list[Outcome | Exception], detail: str
) -> None:
    monkeypatch.setattr(code_reward, "Sandbox", lambda **_: ScriptedSandbox([*script]))
    found = score("```python\nprint(1)\n```", TWO_TESTS)
    assert found.verdict == "invalid"
    assert detail in found.detail


LONGEST = Limits().output_bytes - 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("output", [b"\xff" * LONGEST, b"a" * LONGEST, "\u00e9".encode() * (LONGEST // 2)])
def test_a_program_does_not_get_itself_masked_by_output_that_takes_long_to_read(
    monkeypatch: pytest.MonkeyPatch, output: bytes
) -> None:
    monkeypatch.setattr(code_reward, "Sandbox", lambda **_: ScriptedSandbox([outcome(output)] * 100))
    started = time.process_time()
    found = score("```python\nprint(1)\n```", json.dumps({"inputs": ["1"] * 100, "outputs": ["1"] * 100}))
    assert found.verdict == "wrong"
    assert "test 1: expected '1', got" in found.detail
    assert time.process_time() - started < 8


def test_the_time_to_compare_a_right_output_counts_as_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    output = outcome(b"\n" * (LONGEST - 2) + b"01", wall_s=0.0)
    monkeypatch.setattr(code_reward, "Sandbox", lambda **_: ScriptedSandbox([output] * 330))
    spec = RewardSpec(reward_type="code", timeout_s=0.5)
    tests = json.dumps({"inputs": ["1"] * 330, "outputs": ["01"] * 330})
    reward = CodeReward(spec)
    reward._clock_s = 60.0  # however long this process waits for a core
    (found,) = reward.score(["```python\nprint(1)\n```"], Problem(ground_truth=tests))
    assert found.verdict == "wrong"
    assert "all tests up to here took more than 0.4 s" in found.detail


def test_without_time_on_the_clock_nothing_is_run_and_nothing_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code_reward, "Sandbox", lambda **_: ScriptedSandbox([*RIGHT]))
    clock = iter([0.0, 0.0, 1.0, 100.0])
    monkeypatch.setattr(code_reward.time, "monotonic", lambda: next(clock))
    found = score("```python\nprint(1)\n```", TWO_TESTS)
    assert found.verdict == "invalid"
    assert found.detail == "test 2: no time is left, since the machine was too busy"
