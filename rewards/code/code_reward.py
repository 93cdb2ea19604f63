"""Score a response with a Python program: 1 if it passes all tests, else 0.

Nothing that the program can reach decides: expected outputs never enter the sandbox, and what is compared is read from
descriptors that this side holds, after the program and all that it started have ended.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from coati_rl.errors import ConfigError
from coati_rl.reward_spec import RewardSpec
from coati_rl.sandbox import Limits, Outcome, Sandbox, SandboxError
from coati_rl.sandbox.limits import MIB
from coati_rl.text import shorten
from coati_rl.types import Problem, Score
from rewards.code.code_tests import CodeTest, CodeTests, parse_tests
from rewards.code.fences import last_program
from rewards.reward import invalid_score

_MAX_ATTEMPTS = 2  # per run, when the sandbox itself fails
_MAX_SHOWN = 1000  # bytes of what was found in the place of what is expected
_LIMITS_REACHED = ("cpu", "wall", "memory", "processes")
# Of the time of a response, for all tests together: what the program may take itself, and with waiting for a core.
# Past the first it is too slow, which is wrong; past the second nothing is known. The rest is ours, to say so in time.
_OWN_SHARE, _CLOCK_SHARE = 0.8, 0.9


class CodeReward:
    """A `Reward`. Its sandbox is started with the first program and stays."""

    is_batch = False

    def __init__(self, spec: RewardSpec) -> None:
        self._limits = Limits(cpu_s=spec.test_timeout_s, memory_bytes=spec.test_memory_mb * MIB)
        self._own_s, self._clock_s = _OWN_SHARE * spec.timeout_s, _CLOCK_SHARE * spec.timeout_s
        self._sandbox = Sandbox(is_isolated=spec.is_sandboxed)

    def score(self, responses: Sequence[str], problem: Problem) -> Iterator[Score]:
        """As `Reward.score`; the ground truth is the tests, as JSON."""
        for response in responses:
            yield self._score(response, problem.ground_truth)

    def close(self) -> None:
        """End the sandbox; otherwise it ends with this process."""
        self._sandbox.close()

    def _score(self, response: str, ground_truth: str) -> Score:
        try:
            tests = parse_tests(ground_truth)
        except ValueError as error:
            return invalid_score(f"the tests {shorten(ground_truth)} cannot be read: {shorten(error)}")
        program = last_program(response)
        if program is None:
            return _score_of(0, tests, "no closed ```python fence", has_program=False)
        return self._run_tests(program, tests)

    def _run_tests(self, program: str, tests: CodeTests) -> Score:
        """Run all tests; past the first failure only as long as that is cheap, for the fraction alone.

        Reading and comparing what a program wrote counts as its own time, as much as it takes of a core.
        """
        num_passed, failure, undecided, own_s, started_s = 0, "", "", 0.0, time.monotonic()
        for number, test in enumerate(tests.tests, 1):
            ours_s, left_s = time.thread_time(), self._clock_s - (time.monotonic() - started_s)
            if left_s <= 0:
                undecided = f"test {number}: no time is left, the machine was too busy"
                break
            try:
                outcome = self._run(program, test, tests.function, left_s)
            except (SandboxError, ConfigError, OSError) as error:
                undecided = str(error)
                break
            problem = self._problem(outcome, test, tests)
            own_s += outcome.wall_s - outcome.waited_s + time.thread_time() - ours_s
            if own_s > self._own_s:
                failure = failure or f"test {number}: all tests up to here took more than {self._own_s:g} s"
                break
            if outcome.end == "starved":
                undecided = f"test {number}: {outcome.explain(self._limits)}"
                break
            num_passed += not problem
            failure = failure or (problem and f"test {number}: {problem}")
            is_cheap = time.monotonic() - started_s <= self._limits.cpu_s
            if outcome.end in _LIMITS_REACHED or (failure and not is_cheap):
                break
        if undecided and not failure:
            return invalid_score(undecided)
        return _score_of(num_passed, tests, failure, has_program=True)

    def _run(self, program: str, test: CodeTest, function: str, most_wall_s: float) -> Outcome:
        limits = replace(self._limits, most_wall_s=most_wall_s)
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            try:
                return self._sandbox.run(program, stdin=test.stdin, function=function, limits=limits)
            except SandboxError:
                if attempt == _MAX_ATTEMPTS:
                    raise
        raise AssertionError("unreachable")

    def _problem(self, outcome: Outcome, test: CodeTest, tests: CodeTests) -> str:
        """Why the run failed the test; "" if it passed."""
        if max(len(outcome.output), len(outcome.returned)) >= self._limits.output_bytes:
            return f"more than {self._limits.output_bytes // MIB} MiB of output"
        if outcome.end != "exit" or outcome.code != 0:
            return outcome.explain(self._limits)
        if tests.is_passed(test, output=outcome.output, returned=outcome.returned):
            return ""
        found = outcome.returned if tests.function else outcome.output
        return f"{shorten(test.expected)!r} is expected, it is {shorten(found[:_MAX_SHOWN].decode(errors='replace'))!r}"


def _score_of(num_passed: int, tests: CodeTests, failure: str, *, has_program: bool) -> Score:
    num_tests = len(tests.tests)
    is_correct = num_passed == num_tests
    passed = f"{num_passed} of {num_tests} tests passed"
    return Score(
        reward=1.0 if is_correct else 0.0,
        answer_correct=is_correct,
        format_valid=has_program,
        verdict="ok" if is_correct else "wrong",
        detail=passed if is_correct else f"{passed}; {shorten(failure, 300)}",
        breakdown={"tests_passed": num_passed / num_tests},
    )
