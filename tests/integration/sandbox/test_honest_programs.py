"""Test that correct programs in many styles get their reward."""

import json
from collections import Counter
from collections.abc import Iterator

import pytest

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem
from rewards.code.code_reward import CodeReward
from tests.integration.sandbox.honest_programs import HonestProgram, honest_programs
from tests.integration.sandbox.running import once_decided

PROGRAMS = honest_programs()


@pytest.fixture(scope="module")
def reward() -> Iterator[CodeReward]:
    reward = CodeReward(RewardSpec(reward_type="code", timeout_s=60.0))
    yield reward
    reward.close()


def test_there_are_enough_and_no_two_have_one_name_or_one_text() -> None:
    assert len(PROGRAMS) >= 250
    assert Counter(program.name for program in PROGRAMS).most_common(1)[0][1] == 1
    assert Counter(program.response for program in PROGRAMS).most_common(1)[0][1] == 1


@pytest.mark.parametrize(
    "program",
    [pytest.param(each, marks=[pytest.mark.full] * (n % 3 > 0), id=each.name) for n, each in enumerate(PROGRAMS)],
)
def test_an_honest_program_is_right(program: HonestProgram, reward: CodeReward) -> None:
    (found,) = once_decided(
        lambda: [*reward.score([program.response], Problem(ground_truth=program.tests))],
        lambda scores: scores[0].verdict == "invalid",
    )
    assert (found.verdict, found.reward) == ("ok", 1.0), found.detail


SEVENS = 5001 * "7"
PLUS_1 = f"{SEVENS[:-1]}8"


@pytest.mark.parametrize(
    ("source", "given", "expected"),
    [
        ("print(10**5001 // 9 * 7)", "", SEVENS),
        ("print(int(input()) + 1)", SEVENS, PLUS_1),
        ("from multiprocessing import Pool\nprint(*Pool(1).map(str, [10**5001 // 9 * 7]))", "", SEVENS),
        ("def f(a): return a + 1", SEVENS, PLUS_1),
        ("def f(a): return [a, {'b': a + 1}]", SEVENS, f'[{SEVENS}, {{"b": {PLUS_1}}}]'),
        ("def f(a): return (True, a)", SEVENS, f"(True, {SEVENS})"),
    ],
    ids=["printed", "read", "in another process", "returned", "returned in a list", "expected as Python's literals"],
)
def test_an_integer_may_have_more_digits_than_python_converts(
    source: str, given: str, expected: str, reward: CodeReward
) -> None:
    function = {"fn_name": "f"} if source.startswith("def") else {}
    tests = json.dumps({"inputs": [given], "outputs": [expected], **function})
    (found,) = reward.score([f"```python\n{source}\n```"], Problem(ground_truth=tests))
    assert found.verdict == "ok", found.detail
