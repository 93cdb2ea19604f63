"""What the code reward says before any program runs: which program a response holds, and whether there are tests."""

import time

import pytest

from coati_rl.reward_spec import RewardSpec
from coati_rl.types import Problem, Score
from rewards.code.code_reward import CodeReward, last_program

TESTS = '{"inputs": ["1"], "outputs": ["1"]}'


def score(response: str, ground_truth: str = TESTS) -> Score:
    (found,) = CodeReward(RewardSpec(reward_type="code")).score([response], Problem(ground_truth=ground_truth))
    return found


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nx\n```", "x\n"),
        ("```py\nx\n```", "x\n"),
        ("```python3\nx\n```", "x\n"),
        ("```Python\nx\n```", "x\n"),
        ("``` python \nx\n```", "x\n"),
        ("```python\r\nx\r\n```", "x\r\n"),
        ("text ```python\nx\n``` text", "x\n"),
        ("```python\nx```", "x"),
        ("```python\n```", ""),
        ("```python\nnever closed </think>\n```python\nmeant\n```", "meant\n"),
        ("```python\nfirst\n```\n```python\nlast\n```", "last\n"),
        ("```python\nright\n```\n```python\nwrong\n```\nThe first one is meant.", "wrong\n"),
        ("```python\nclosed\n```\n```python\nopen\n", "closed\n"),
        ("```\nother\n```\n```python\nx\n```\n```cpp\nint main;\n```", "x\n"),
        ("<think>```python\nmaybe\n```</think>```python\nx\n```", "x\n"),
        ('```python\nprint("```")\n```', 'print("'),  # a fence in a string ends it, as in Markdown on a line of its own
        ("````python\nx\n````", "x\n"),
    ],
)
def test_the_last_closed_fence_is_the_program(response: str, program: str) -> None:
    assert last_program(response) == program


@pytest.mark.parametrize(
    "response",
    [
        "",
        "print(1)",
        "```\nprint(1)\n```",
        "```cpp\nint main;\n```",
        "```python\nprint(1)\n",
        "```python print(1)```",
        "```python\nprint(1)\n``",
        "'''python\nprint(1)\n'''",
        "```pythonic\nprint(1)\n```",
        "``` `python\nprint(1)\n```",
    ],
)
def test_without_a_closed_fence_there_is_no_program(response: str) -> None:
    assert last_program(response) is None


@pytest.mark.parametrize(
    "response",
    ["`" * 10**6, "```python\n" * 10**5, "``` " * 250_000, "```" + " \t" * 500_000, "```python " * 10**5],
    ids=["backticks", "openings", "spaced", "white space", "no line end"],
)
def test_a_response_of_fences_is_read_at_once(response: str) -> None:
    started = time.process_time()
    last_program(response)
    assert time.process_time() - started < 1


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
        ('{"inputs": [], "outputs": []}', "must be equally many, at least one"),
    ],
)
def test_tests_that_cannot_be_read_leave_a_response_undecided(ground_truth: str, detail: str) -> None:
    found = score("```python\nprint(1)\n```", ground_truth)
    assert found.verdict == "invalid"
    assert detail in found.detail
