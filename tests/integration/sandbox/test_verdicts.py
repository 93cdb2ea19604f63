"""Test that programs that try to obtain a verdict are `wrong`, never `ok` and never `invalid`."""

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem, Score
from rewards.code.code_reward import CodeReward
from tests.integration.sandbox.attacks_on_function_verdicts import OF_FUNCTIONS
from tests.integration.sandbox.attacks_on_verdicts import OF_PROGRAMS, OF_PROGRAMS_THAT_END_BADLY, Forgery
from tests.integration.sandbox.running import once_decided, own_processes

SPEC = RewardSpec(reward_type="code", timeout_s=20.0, test_timeout_s=0.5)
(ENDLESS,) = (each for each in OF_FUNCTIONS if each.name == "a list without end")  # half a second each time
SUM = json.dumps({"inputs": ["1 2\n", "10 -3\n"], "outputs": ["3\n", "7\n"]})
RIGHT = "a, b = map(int, input().split())\nprint(a + b)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """A reward whose sandbox is up."""

    reward: CodeReward
    processes: tuple[int, ...]  # of the sandbox: bubblewrap, the supervisor


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    others = own_processes()
    reward = CodeReward(SPEC)
    score(reward, fenced(RIGHT), SUM)
    yield Judge(reward=reward, processes=tuple(pid for pid in own_processes() if pid not in others))
    reward.close()
    assert own_processes() == others


def fenced(source: str) -> str:
    return f"This is how.\n```python\n{source}\n```\n"


def score(reward: CodeReward, response: str, ground_truth: str, *, may_reach_the_clock: bool = False) -> Score:
    """Of another run where the machine was too busy to say, or for the limit on the clock."""
    told = ("waited for a core", "too busy", *(() if may_reach_the_clock else ("no end after",)))

    def run() -> Score:
        (found,) = reward.score([response], Problem(ground_truth=ground_truth))
        return found

    return once_decided(run, lambda found: any(text in found.detail for text in told))


def assert_wrong(judge: Judge, forgery: Forgery, ground_truth: str) -> None:
    processes = own_processes()
    may_reach_the_clock = forgery.detail in ("", "no end after")
    found = score(judge.reward, fenced(forgery.source), ground_truth, may_reach_the_clock=may_reach_the_clock)
    assert (found.verdict, found.reward, found.answer_correct) == ("wrong", 0.0, False), found
    assert forgery.detail in found.detail
    assert json.loads(json.dumps(found.detail)) == found.detail
    assert own_processes() == processes  # the same: none is left, and the sandbox did not have to be started again
    right = score(judge.reward, fenced(RIGHT), SUM)
    assert (right.verdict, right.reward) == ("ok", 1.0), right


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "forgery",
    [*OF_PROGRAMS, *OF_PROGRAMS_THAT_END_BADLY],
    ids=lambda forgery: forgery.name,
)
def test_a_program_that_does_not_know_the_answer_is_wrong(forgery: Forgery, judge: Judge) -> None:
    answer = secrets.token_hex(16)
    assert_wrong(judge, forgery, json.dumps({"inputs": ["question\n"], "outputs": [answer]}))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("forgery", OF_FUNCTIONS, ids=lambda forgery: forgery.name)
def test_a_function_that_does_not_know_the_answer_is_wrong(forgery: Forgery, judge: Judge) -> None:
    answer = secrets.token_hex(16)
    values = (answer, [answer], {"answer": answer})
    for value in values[:1] if forgery is ENDLESS else values:
        ground_truth = json.dumps({"fn_name": "f", "inputs": [[[1]]], "outputs": [json.dumps(value)]})
        assert_wrong(judge, forgery, ground_truth)


def test_a_program_without_the_function_does_not_have_a_library_s(judge: Judge) -> None:
    tests = json.dumps({"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]})
    without = score(judge.reward, fenced("x = 1"), tests)
    assert (without.verdict, without.detail) == ("wrong", "0 of 1 tests passed; test 1: exit code 1: KeyError: 'gcd'")
    assert score(judge.reward, fenced("from math import gcd"), tests).verdict == "ok"
    own = "def gcd(a, b): return math.gcd(a, b)"
    assert score(judge.reward, fenced(own), tests).verdict == "ok"


def test_converting_an_integer_that_takes_too_long_ends_at_the_limit_of_cpu_time(judge: Judge) -> None:
    for source in ("print(1 << (1 << 26))", "int('7' * (1 << 23))"):
        found = score(judge.reward, fenced(source), SUM)
        assert (found.verdict, found.reward) == ("wrong", 0.0), found
        assert "more than 0.5 s of CPU time" in found.detail


@pytest.mark.full
def test_a_program_with_a_low_priority_on_a_busy_machine_is_too_slow_not_invalid(judge: Judge) -> None:
    source = """
import os
import re
for lower in (lambda: os.nice(19), lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)),
              lambda: os.sched_setaffinity(0, {0})):
    try:
        lower()
    except OSError:
        pass
while True: pass
"""
    burners = [subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]) for _ in range(3)]
    try:
        found = score(judge.reward, fenced(source), SUM)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    assert found.verdict == "wrong", found
    assert "more than 0.5 s of CPU time" in found.detail


def test_a_program_that_takes_its_time_in_every_test_is_too_slow_not_invalid() -> None:
    reward = CodeReward(RewardSpec(reward_type="code", timeout_s=2.0, test_timeout_s=1.0))
    tests = json.dumps({"inputs": ["1 2\n"] * 10, "outputs": ["3\n"] * 10})
    found = score(reward, fenced(f"import time\n{RIGHT}\ntime.sleep(0.5)"), tests)
    reward.close()
    assert found.verdict == "wrong"
    assert re.fullmatch(r"[123] of 10 .*; test [234]: all tests up to here took more than 1\.6 s", found.detail)


def test_a_program_that_fails_is_wrong_also_when_the_sandbox_fails_after_that(monkeypatch: pytest.MonkeyPatch) -> None:
    reward = CodeReward(SPEC)
    source = "a, b = map(int, input().split())\nprint(a - b)"
    tests = json.dumps({"inputs": ["1 2\n", "4 1\n"], "outputs": ["3\n", "5\n"]})
    run = reward._sandbox.run
    runs = []

    def run_once(*arguments: object, **options: object) -> object:
        runs.append(1)
        if len(runs) == 2:
            monkeypatch.setenv("PATH", "/nowhere")
            reward.close()
        return run(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(reward._sandbox, "run", run_once)
    found = score(reward, fenced(source), tests)
    assert found.verdict == "wrong"
    assert found.detail.startswith("0 of 2 tests passed; test 1: expected '3', got '-1'")


def test_the_limits_are_those_of_the_reward() -> None:
    source = "x = bytearray(100 << 20)\n" + RIGHT
    for memory_mb, verdict in ((64, "wrong"), (512, "ok")):
        reward = CodeReward(RewardSpec(reward_type="code", timeout_s=20.0, test_memory_mb=memory_mb))
        assert score(reward, fenced(source), SUM).verdict == verdict
        reward.close()


def test_the_fraction_of_tests_that_pass_is_told_and_all_have_to(judge: Judge) -> None:
    tests = json.dumps({"inputs": ["1 2", "1 -2", "-1 2", "0 0"], "outputs": ["3", "-1", "1", "0"]})
    found = score(judge.reward, fenced("a, b = map(int, input().split())\nprint(abs(a) + b)"), tests)
    assert (found.verdict, found.reward, found.breakdown) == ("wrong", 0.0, {"tests_passed": 0.75})
    assert found.detail == "3 of 4 tests passed; test 3: expected '1', got '3'"
    right = score(judge.reward, fenced(RIGHT), tests)
    assert (right.verdict, right.reward, right.breakdown) == ("ok", 1.0, {"tests_passed": 1.0})


def test_without_bubblewrap_a_response_is_invalid_and_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = score(CodeReward(SPEC), fenced(RIGHT), SUM)
    assert found.verdict == "invalid"
    assert "apt install bubblewrap" in found.detail


def test_a_sandbox_that_is_killed_from_outside_is_started_again_and_the_program_judged() -> None:
    others = own_processes()
    reward = CodeReward(SPEC)
    assert score(reward, fenced(RIGHT), SUM).verdict == "ok"
    for pid in own_processes():
        if pid not in others:
            os.kill(pid, signal.SIGKILL)
    assert score(reward, fenced(RIGHT), SUM).verdict == "ok"
    reward.close()
    assert own_processes() == others
