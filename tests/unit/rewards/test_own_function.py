"""Test a user's reward function: how it is called, and what its return values and exceptions become."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from coati_rl.errors import ConfigError
from coati_rl.types import Problem, Score
from rewards.own_function import OwnFunctionReward

PROBLEM = Problem(
    uid="train-3.0",
    ground_truth="4",
    messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}),
    prompt="s:Be brief.\nu:2+2?\na:",
)


@pytest.fixture
def own(tmp_path: Path) -> Callable[[str], OwnFunctionReward]:
    """The source of a file with a function `score` -> the reward."""

    def make(source: str) -> OwnFunctionReward:
        path = tmp_path / "mine.py"
        path.write_text(source, encoding="utf-8")
        return OwnFunctionReward(f"{path}:score")

    return make


def rewards_of(reward: OwnFunctionReward, *responses: str) -> list[float]:
    return [score.reward for score in reward.score(responses, PROBLEM)]


def test_rl2s_form_gets_the_conversation_with_the_response_and_the_ground_truth(own) -> None:
    reward = own(
        "def score(messages, answer):\n"
        "    assert [m['role'] for m in messages] == ['system', 'user', 'assistant'], messages\n"
        "    assert messages[1]['content'] == '2+2?'\n"
        "    return messages[-1]['content'] == answer\n"
    )
    assert not reward.is_batch
    assert rewards_of(reward, "4", "5") == [1.0, 0.0]


def test_openrlhfs_form_gets_the_whole_group_with_rendered_prompts(own) -> None:
    reward = own(
        "def score(queries, prompts, labels, **kwargs):\n"
        "    assert prompts == ['s:Be brief.\\nu:2+2?\\na:'] * 2 and labels == ['4'] * 2 and not kwargs\n"
        "    return [query == prompt + '4' for query, prompt in zip(queries, prompts)]\n"
    )
    assert reward.is_batch
    assert rewards_of(reward, "4", "5") == [1.0, 0.0]


def test_openrlhfs_own_example_with_tensors_scores_and_logs(own) -> None:
    reward = own(
        "import torch\n"
        "def score(queries, prompts, labels, **kwargs):\n"
        "    reward = torch.tensor([float(query.endswith('4')) for query in queries])\n"
        "    return {'rewards': reward - 0.5, 'scores': reward, 'extra_logs': {'dummy_scores': reward}}\n"
    )
    first, second = reward.score(["4", "5"], PROBLEM)
    assert (first.reward, first.answer_correct, first.breakdown) == (0.5, True, {"dummy_scores": 1.0})
    assert (second.reward, second.answer_correct, second.breakdown) == (-0.5, False, {"dummy_scores": 0.0})
    assert (first.filter_score, second.filter_score) == (1.0, 0.0), "OpenRLHF filters groups on scores"


def test_our_form_gets_two_texts_and_may_have_more_with_defaults(own) -> None:
    reward = own(
        "def score(response, ground_truth, *, bonus=0.25, **others): return (response == ground_truth) + bonus"
    )
    assert rewards_of(reward, "4", "5") == [1.25, 0.25]


def test_the_order_of_parameters_does_not_matter(own) -> None:
    assert rewards_of(own("def score(ground_truth, response): return response == ground_truth"), "4") == [1.0]


def test_a_function_may_have_its_own_score(own) -> None:
    reward = own(
        "from coati_rl.types import Score\n"
        "def score(response, ground_truth):\n"
        "    return Score(reward=0.5, answer_correct=False, format_valid=True, verdict='wrong', detail='half')\n"
    )
    expected = Score(reward=0.5, answer_correct=False, format_valid=True, verdict="wrong", detail="half")
    assert list(reward.score(["x"], PROBLEM)) == [expected]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("def score(response, **columns): return 1", "takes (response, **columns)"),
        ("def score(response, ground_truth, tolerance): return 1", "takes (response, ground_truth, tolerance)"),
        ("def score(response, ground_truth, /): return 1", "takes (response, ground_truth)"),
        ("def score(queries, labels): return 1", "takes (queries, labels)"),
        ("def score(*args, **kwargs): return 1", "takes (*args, **kwargs)"),
        ("def score(): return 1", "names no parameters"),
        ("score = min", "names no parameters"),
    ],
)
def test_other_parameters_are_refused_with_the_three_forms(own, source: str, cause: str) -> None:
    with pytest.raises(ConfigError) as caught:
        own(source)
    message = str(caught.value)
    assert message.startswith("--reward-type ") and f"mine.py:score: {cause}; a reward function takes " in message
    assert "(messages, answer), (queries, prompts, labels) or (response, ground_truth)" in message


@pytest.mark.parametrize(
    ("inputs", "truth", "returned"),
    [("messages", "answer", "{}"), ("queries, prompts", "labels", "[{}]"), ("response", "ground_truth", "{}")],
)
def test_a_function_needs_a_ground_truth_unless_its_parameter_has_a_default_or_is_left_out(
    tmp_path: Path, inputs: str, truth: str, returned: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        f"def needing({inputs}, {truth}): return {returned.format(f'len({truth})')}\n"
        f"def defaulted({inputs}, {truth}='12345'): return {returned.format(f'len({truth})')}\n"
        f"def without({inputs}): return {returned.format('0.5')}\n"
    )
    needing, defaulted, without = (OwnFunctionReward(f"{path}:{name}") for name in ("needing", "defaulted", "without"))
    assert [reward.needs_truth for reward in (needing, defaulted, without)] == [True, False, False]
    nothing = replace(PROBLEM, ground_truth="")
    assert [score.reward for score in defaulted.score(["x"], nothing)] == [5.0], "the default, and not an empty text"
    assert rewards_of(defaulted, "x") == rewards_of(needing, "x") == [1.0], "the row's 4, or a list of it"
    assert rewards_of(without, "x") == [0.5]


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("import nowhere_to_be_found", "fails on import: ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
        ("raise SystemExit(3)", "fails on import: SystemExit: 3"),
        ("def other(response, ground_truth): return 1", "has no function 'score'"),
        ("score = 1", "has no function 'score'"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(own, source: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        own(source)


@pytest.mark.parametrize(
    ("statement", "detail"),
    [
        ("raise ValueError('no such row')", "ValueError: no such row (mine.py:3)"),
        ("return 1 / 0", "ZeroDivisionError: division by zero (mine.py:3)"),
        ("assert False", "AssertionError (mine.py:3)"),
        ("import sys; sys.exit(3)", "SystemExit: 3 (mine.py:3)"),
        ("raise SystemExit", "SystemExit (mine.py:3)"),
        ("import json; json.loads('{')", "JSONDecodeError: Expecting property name enclosed in double quotes"),
        ("return score(response, ground_truth)", "RecursionError: maximum recursion depth exceeded"),
        ("raise ValueError('a' * 1000)", f"ValueError: {'a' * 197}... (mine.py:3)"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "async "])
def test_what_a_function_raises_is_an_invalid_score_with_the_line_and_the_others_go_on(
    own, statement: str, detail: str, prefix: str
) -> None:
    if prefix and "score(response" in statement:
        statement = "return await score(response, ground_truth)"
    reward = own(
        f"{prefix}def score(response, ground_truth):\n    if response == 'bad':\n        {statement}\n    return 1\n"
    )
    good, bad, after = reward.score(["good", "bad", "good"], PROBLEM)
    assert (bad.verdict, bad.reward, bad.answer_correct) == ("invalid", 0.0, False)
    assert bad.detail.startswith(detail) and "mine.py:3)" in bad.detail
    assert good.reward == after.reward == 1.0 and good.verdict == after.verdict == "ok"


def test_what_a_function_of_a_group_raises_makes_the_group_invalid(own) -> None:
    reward = own("def score(queries, prompts, labels): raise KeyError('x')")
    scores = list(reward.score(["a", "b"], PROBLEM))
    assert [(score.verdict, score.detail) for score in scores] == [("invalid", "KeyError: 'x' (mine.py:1)")] * 2


def test_an_interrupt_is_not_the_functions_failure(own) -> None:
    with pytest.raises(KeyboardInterrupt):
        list(own("def score(response, ground_truth): raise KeyboardInterrupt").score(["a"], PROBLEM))


def test_the_line_is_of_the_users_file_also_when_a_library_raises_below_it(
    own, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "helper_of_mine.py").write_text("def fail():\n\n\n    raise OSError('away')\n", encoding="utf-8")
    reward = own("from helper_of_mine import fail\ndef score(response, ground_truth):\n    return fail()\n")
    (score,) = reward.score(["a"], PROBLEM)
    assert score.detail == "OSError: away (mine.py:3)"


def test_the_traceback_of_each_kind_of_failure_is_logged_once(own, caplog: pytest.LogCaptureFixture) -> None:
    reward = own("def score(response, ground_truth):\n    return {'a': 1}[response]\n")
    with caplog.at_level(logging.WARNING):
        assert [score.verdict for score in reward.score(["b", "a", "c"], PROBLEM)] == ["invalid", "ok", "invalid"]
    (record,) = caplog.records
    assert record.getMessage() == "the reward function failed on a response to prompt 'train-3.0'"
    assert record.exc_info is not None and record.exc_info[0] is KeyError


def test_a_function_may_change_what_it_is_given(own) -> None:
    reward = own(
        "def score(messages, answer):\n    messages[0]['content'] = messages.pop()\n    return len(messages)\n"
    )
    assert rewards_of(reward, "a", "b") == [2.0, 2.0]
    assert PROBLEM.messages[0]["content"] == "Be brief."
