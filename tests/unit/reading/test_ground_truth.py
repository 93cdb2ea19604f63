"""Test what a row is scored against, by reward type."""

import json
import re

import pytest

from coati_rl.errors import ConfigError
from coati_rl.reading.ground_truth import ground_truth, required_truth

TESTS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}
CALLS = {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [3, 7]}


COLUMNS = "gt_answer (or answer, ground_truth, label; --answer-key names another column)"


def refusal(row, required=None):
    with pytest.raises(ConfigError) as caught:
        ground_truth(row, required, "--dataset d.jsonl, line 3")
    return str(caught.value)


@pytest.mark.parametrize(
    ("reward_type", "key"),
    [
        ("boxed", "gt_answer"),
        ("think_answer_tags=2", "gt_answer"),
        ("/mine.py:f=1,boxed=1", "gt_answer"),
        ("code", "test_cases"),
        ("/mine.py:f=1,code=1", "test_cases"),
        ("/mine.py:f", None),
        ("http://rm/score", None),
        ("/mine.py:f=1,http://rm/score=1", None),
    ],
)
def test_the_rewards_decide_what_a_row_needs(reward_type, key):
    assert required_truth(reward_type) == key


@pytest.mark.parametrize(
    ("reward_type", "key"),
    [("/mine.py:f", "either"), ("/mine.py:f=1,http://rm/score=1", "either"), ("/mine.py:f=1,code=1", "test_cases")],
)
def test_a_function_that_takes_a_ground_truth_needs_one_of_either_kind(reward_type, key):
    assert required_truth(reward_type, needs_truth=True) == key


@pytest.mark.parametrize("required", ["gt_answer", "either", None])
@pytest.mark.parametrize("key", ["answer", "ground_truth", "label"])
def test_the_ecosystems_names_of_an_answer_are_read(key, required):
    assert ground_truth({key: 72}, required) == "72"
    assert ground_truth({"gt_answer": "1", key: "72"}, required) == "1", "ours goes first"
    assert ground_truth({"gt_answer": "", key: "72", "test_cases": TESTS}, required) == "72"


def test_two_answers_that_differ_are_refused_and_two_that_agree_are_one():
    assert ground_truth({"answer": 4, "label": "4"}, "gt_answer") == "4"
    row = {"answer": "2 + 2 = 4", "label": "4"}
    cause = "has answer and label, which differ; name the ground truth's column with --answer-key"
    for required in ("gt_answer", "either", None):
        assert refusal(row, required) == f"--dataset d.jsonl, line 3: {cause}"
        assert ground_truth(row, required, answer_key="label") == "4"
    assert json.loads(ground_truth({**row, "test_cases": TESTS}, "test_cases")) == TESTS, "code looks at no answer"


def test_a_named_column_is_read_and_no_other():
    row = {"gt_answer": "1", "answer": "2", "solution": "3"}
    assert ground_truth(row, "gt_answer", answer_key="solution") == "3"
    del row["solution"]
    cause = "has no solution; every row needs messages and solution (--answer-key)"
    with pytest.raises(ConfigError, match=re.escape(cause)):
        ground_truth(row, "gt_answer", answer_key="solution")
    with pytest.raises(ConfigError, match="solution is list; write text or a number"):
        ground_truth({"solution": ["3"]}, "gt_answer", answer_key="solution")


def test_a_function_that_takes_a_ground_truth_gets_tests_where_there_is_no_answer_and_never_nothing():
    assert json.loads(ground_truth({"test_cases": TESTS}, "either")) == TESTS
    assert refusal({"solution": "4"}, "either") == (
        "--dataset d.jsonl, line 3: has no gt_answer (or answer, ground_truth, label; --answer-key names another "
        "column) and no test_cases, and a function of --reward-type takes the ground truth: give its parameter a "
        "default if it can do without"
    )


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"gt_answer": "4"}, "4"),
        ({"gt_answer": 4}, "4"),
        ({"gt_answer": 0}, "0"),
        ({"gt_answer": 0.5, "test_cases": None}, "0.5"),
    ],
)
@pytest.mark.parametrize("required", ["gt_answer", None])
def test_an_answer_is_its_text(row, truth, required):
    assert ground_truth(row, required) == truth


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("required", ["test_cases", None])
@pytest.mark.parametrize("tests", [TESTS, CALLS, {"inputs": [["1", "2"]], "outputs": ["½"]}])
def test_tests_are_json_whether_they_come_as_an_object_or_as_text(tests, required, as_text):
    row = {"test_cases": json.dumps(tests) if as_text else tests, "gt_answer": ""}
    assert json.loads(ground_truth(row, required)) == tests


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize(
    ("cases", "tests"),
    [
        (
            [{"input": "1 2", "output": "3", "testtype": "stdin"}, {"input": "", "output": "0"}],
            {"inputs": ["1 2", ""], "outputs": ["3", "0"]},
        ),
        (
            [{"input": "[1]\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}}],
            {"inputs": ["[1]\n2"], "outputs": ["3"], "fn_name": "f"},
        ),
        (
            [{"input": "1", "output": "3", "testtype": "functional", "metadata": '{"func_name": "f"}'}],
            {"inputs": ["1"], "outputs": ["3"], "fn_name": "f"},
        ),
        (
            [{"input": [[1], 2], "output": 3, "type": "function_call", "fn_name": "f"}],
            {"inputs": [[[1], 2]], "outputs": [3], "fn_name": "f"},
        ),
        (
            [{"input": "1", "output": "1", "testtype": "stdin", "fn_name": None, "metadata": {"func_name": None}}],
            {"inputs": ["1"], "outputs": ["1"]},
        ),
    ],
)
def test_a_list_of_tests_is_as_good(cases, tests, as_text):
    row = {"test_cases": json.dumps(cases) if as_text else cases}
    assert json.loads(ground_truth(row, "test_cases")) == tests


def test_what_is_null_in_a_column_of_other_rows_is_left_out():
    row = {"test_cases": {**TESTS, "fn_name": None}}
    assert json.loads(ground_truth(row, "test_cases")) == TESTS


def test_a_row_with_both_is_scored_by_what_the_reward_needs_and_by_the_answer_if_it_needs_nothing():
    row = {"gt_answer": "4", "test_cases": TESTS}
    truths = [ground_truth(row, required) for required in ("gt_answer", "test_cases", None)]
    assert truths == ["4", json.dumps(TESTS), "4"]


def test_a_row_with_neither_has_an_empty_ground_truth_where_none_is_needed():
    assert ground_truth({}, None) == ground_truth({"gt_answer": None, "test_cases": {}}, None) == ""


@pytest.mark.parametrize(
    ("row", "required", "cause"),
    [
        ({}, "gt_answer", f"has no gt_answer; every row needs messages and {COLUMNS}"),
        ({"gt_answer": ""}, "gt_answer", f"has no gt_answer; every row needs messages and {COLUMNS}"),
        (
            {"test_cases": TESTS},
            "gt_answer",
            f"has no gt_answer; every row needs messages and {COLUMNS} (it has test_cases: use --reward-type code)",
        ),
        ({}, "test_cases", "has no test_cases; every row needs messages and test_cases"),
        (
            {"gt_answer": "4"},
            "test_cases",
            "has no test_cases; every row needs messages and test_cases for --reward-type code (it has an answer: "
            "use boxed or think_answer_tags)",
        ),
        ({"gt_answer": [4]}, None, "gt_answer is list; write text or a number"),
        ({"gt_answer": True}, None, "gt_answer is bool; write text or a number"),
        ({"gt_answer": float("inf")}, None, "gt_answer is inf; write text or a finite number"),
    ],
)
def test_a_row_without_its_ground_truth_is_refused_with_its_place(row, required, cause):
    assert refusal(row, required) == f"--dataset d.jsonl, line 3: {cause}"


@pytest.mark.parametrize(
    ("tests", "cause"),
    [
        ("{broken", "test_cases is text that is not JSON (Expecting property name"),
        ("[" * 100_000, "test_cases is nested more than 100 deep"),
        ("[1]", 'test_cases, test 1 has no input and output; write [{"input": ..., "output": ...}, ...]'),
        ([{"input": "1", "output": "1"}, {"input": "1"}], "test_cases, test 2 has no input and output; write"),
        ([{"input": [1], "output": "1"}], "test_cases, test 1: its input is list; write the text that"),
        (
            [{"input": "1", "output": "1", "testtype": "functional"}],
            'test_cases, test 1 is functional and names no function; add "fn_name": name to it',
        ),
        (
            [{"input": "1", "output": "1", "fn_name": "f"}, {"input": "1", "output": "1"}],
            "test_cases call f and no function; write a row for each function",
        ),
        (7, 'test_cases is int; write {"inputs": [...], "outputs": [...]}'),
        ({"inputs": ["1"]}, "test_cases has no list of outputs; write"),
        ({"inputs": "1", "outputs": ["1"]}, "test_cases has no list of inputs; write"),
        ({"inputs": [], "outputs": []}, "test_cases has no list of inputs; write"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "test_cases has 2 inputs and 1 outputs; write an output for each"),
        ({"inputs": ["1", 2], "outputs": ["1", "2"]}, "test_cases, test 2: its input is int; write the text that"),
        ({"inputs": ["1"], "outputs": [None]}, "test_cases, test 1: its output is NoneType; write the text that"),
        ({"inputs": [[1, 2]], "outputs": ["3"]}, "test_cases, test 1: its input is list; write the text that"),
        ({**CALLS, "fn_name": ""}, "the fn_name of test_cases is not text; write the name of a function"),
        ({**CALLS, "fn_name": 3}, "the fn_name of test_cases is not text; write the name of a function"),
    ],
)
@pytest.mark.parametrize("required", ["test_cases", None])
def test_tests_that_cannot_be_run_are_refused_with_their_place(tests, cause, required):
    assert refusal({"test_cases": tests}, required).startswith(f"--dataset d.jsonl, line 3: {cause}")
