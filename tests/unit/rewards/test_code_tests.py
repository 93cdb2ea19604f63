"""Test parsing of the tests of a coding problem, and which outputs and values pass them."""

import json
import time
from typing import Any

import pytest

from rewards.code.code_tests import parse_tests, same_output, same_value

SAME_OUTPUTS = [
    ("3\n", "3"),
    ("3", "3\n"),
    ("1 2 3", "1 2 3  \n"),
    ("1  2\t3", "1 2 3"),
    ("1\n\n2\n", "1\n2"),
    ("1\r\n2\r\n", "1\n2\n"),
    ("", "\n"),
    ("5", "5.0"),
    ("5.0", "5"),
    ("5.000", "5"),
    ("5e0", "5"),
    ("+5", "5"),
    ("-0", "0"),
    (".5", "0.5"),
    ("0.30000000000000004", "0.3"),
    ("0.333333", "0.3333333333"),
    ("1000000.4", "1000000.0"),
    ("1e-9", "0.0"),
    ("1e3", "1000.0"),
    ("YES 0.1000000001", "YES 0.1"),
    ("nan", "nan"),
    ("inf", "inf"),
    ("1e9999", "1e9999"),
    ("é 漢", "é 漢"),
    ("\ufeff1", "\ufeff1"),
    ("9" * 5000, "9" * 5000),
]
OTHER_OUTPUTS = [
    ("3", "4"),
    ("101", "00101"),
    ("007", "7"),
    ("", "3"),
    ("3", ""),
    ("1 2", "1\n2"),
    ("1\n2", "1 2"),
    ("2\n1", "1\n2"),
    ("1\n2\n3", "1\n2"),
    ("1 2 3", "1 2"),
    ("yes", "YES"),
    ("1000001", "1000002"),
    ("1000001.0", "1000002"),
    ("10000000000000001", "10000000000000002"),
    ("5.001", "5"),
    ("5.00000001", "5"),
    ("0.1", "0.2"),
    ("1000011.0", "1000000.0"),
    ("-0.5", "0.5"),
    ("1e-7", "0.0"),
    ("nan", "0.0"),
    ("nan", "NaN"),
    ("inf", "1e9"),
    ("1e9998", "1e9999"),  # no float can hold either
    ("1e99999", "1.0"),
    ("0x10", "16"),
    ("1_000", "1000"),
    ("1,000", "1000"),
    ("\uff11", "1"),  # full width
    ("5", "five"),
    ("9" * 5000, "9" * 4999 + "8"),
    ("1" * 2000 + ".0", "1" * 2000),
    ("3\x00", "3"),
    ("\udcff", "\ufffd"),
    ("1\n2", "1\x0b2"),
]


@pytest.mark.parametrize(("actual", "expected"), SAME_OUTPUTS)
def test_outputs_that_are_the_same(actual: str, expected: str) -> None:
    assert same_output(actual, expected)


@pytest.mark.parametrize(("actual", "expected"), OTHER_OUTPUTS)
def test_outputs_that_are_not(actual: str, expected: str) -> None:
    assert not same_output(actual, expected)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "actual",
    ["\n" * (1 << 24), "a\n" * (1 << 23), "a " * (1 << 23), "9" * (1 << 24), "." * (1 << 24)],
    ids=["lines", "lines of a word", "words", "digits", "dots"],
)
def test_output_as_long_as_can_be_is_told_apart_at_once(actual: str) -> None:
    started = time.process_time()
    assert not same_output(actual, "a\nb")
    assert not same_output(actual, "9.5")
    assert time.process_time() - started < 2


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (3, 3),
        (3.0, 3),
        (3, 3.0),
        (0.1 + 0.2, 0.3),
        (True, True),
        (None, None),
        ("a", "a"),
        ([1, [2, 3]], [1, [2, 3]]),
        ([], []),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (10**400, 10**400),
        (float("inf"), float("inf")),
        (5, [5]),  # APPS wraps what is expected
        ([1, 2], [[1, 2]]),
        ("a", ["a"]),
    ],
)
def test_values_that_are_the_same(actual: Any, expected: Any) -> None:
    assert same_value(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (3, 4),
        (3, "3"),
        ("3", 3),
        (1000001, 1000002),
        (1000001, 1000002.0 + 20),
        (10**400, 1.0),
        (None, 0),
        (None, False),
        ([1, 2], [2, 1]),
        ([1, 2], [1, 2, 3]),
        ([1], 1),  # a right value is not wrapped
        ([[5]], [5]),
        ([], [1]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"b": 1}),
        ({}, []),
        (float("nan"), float("nan")),
        (float("nan"), 1.0),
        (float("inf"), 1e308),
        (float("inf"), float("-inf")),
        ("ab", ["a", "b"]),
        ("yes", "Yes"),
    ],
)
def test_values_that_are_not(actual: Any, expected: Any) -> None:
    assert not same_value(actual, expected)


def test_inputs_and_outputs_are_paired_in_order() -> None:
    tests = parse_tests('{"inputs": ["1 2\\n", "3 4\\n"], "outputs": ["3\\n", "7\\n"]}')
    assert tests.function == ""
    assert [(test.stdin, test.expected) for test in tests.tests] == [(b"1 2\n", "3\n"), (b"3 4\n", "7\n")]


def test_a_list_of_lines_is_as_good_as_text() -> None:
    (test,) = parse_tests('{"inputs": [["1", "2"]], "outputs": [["3", "é"]]}').tests
    assert (test.stdin, test.expected) == (b"1\n2", "3\né")


def test_a_list_of_tests_as_in_livecodebench_is_as_good() -> None:
    (test,) = parse_tests('[{"input": "1 2\\n", "output": "3", "testtype": "stdin"}]').tests
    assert (test.stdin, test.expected) == (b"1 2\n", "3")
    tests = parse_tests('[{"input": "[1]\\n2", "output": "3", "testtype": "functional", "fn_name": "f"}]')
    assert (tests.function, json.loads(tests.tests[0].stdin), tests.tests[0].expected) == ("f", [[1], 2], 3)


def test_a_function_s_arguments_are_a_list_or_a_json_value_a_line() -> None:
    tests = parse_tests(
        '{"fn_name": "f", "inputs": [[1, [2]], "1\\n[2]\\n", "\\"a\\"\\n\\n"], "outputs": [3, "[3, 4]", "\\"b\\""]}'
    )
    assert tests.function == "f"
    assert [json.loads(test.stdin) for test in tests.tests] == [[1, [2]], [1, [2]], ["a"]]
    assert [test.expected for test in tests.tests] == [3, [3, 4], "b"]


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        (["[1, 2]", '"a"'], [[1, 2], "a"]),
        ([[1, 2], "3"], [[1, 2], 3]),
        (["abc"], ["abc"]),
        (["abc", "5"], ["abc", "5"]),  # text for one test is text for all
        (["True", "None", "[1, (2, 'a')]"], [True, None, [1, [2, "a"]]]),
        (["True", "a b"], ["True", "a b"]),
        (["{1}"], ["{1}"]),
        (["1 +", 5], ["1 +", 5]),
    ],
)
def test_what_a_function_returns_may_be_written_as_json_as_python_or_as_text(outputs: Any, expected: Any) -> None:
    tests = parse_tests(json.dumps({"fn_name": "f", "inputs": [[]] * len(outputs), "outputs": outputs}))
    assert [test.expected for test in tests.tests] == expected


def test_arguments_are_split_at_line_feeds_alone() -> None:
    (test,) = parse_tests(json.dumps({"fn_name": "f", "inputs": ['"a\u2028b"\n1'], "outputs": [1]})).tests
    assert json.loads(test.stdin) == ["a\u2028b", 1]


def test_no_function_name_is_none_or_empty() -> None:
    for name in ('""', "null"):
        assert parse_tests(f'{{"fn_name": {name}, "inputs": ["1"], "outputs": ["1"]}}').function == ""


def test_what_else_a_row_says_of_its_tests_is_not_looked_at() -> None:
    assert len(parse_tests('{"inputs": ["1"], "outputs": ["1"], "difficulty": "easy"}').tests) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("5", "not .*inputs"),
        ("[]", "not .*inputs"),
        ("[1]", "the row: test_cases, test 1 has no input and output"),
        ("{}", "not .*inputs"),
        ('{"inputs": ["1"]}', "not .*inputs"),
        ('{"inputs": "1", "outputs": "1"}', "not .*inputs"),
        ('{"inputs": ["1"], "outputs": ["1"], "fn_name": 5}', "not .*inputs"),
        ('{"inputs": [], "outputs": []}', "0 inputs and 0 outputs; give equally many, at least one"),
        ('{"inputs": ["1", "2"], "outputs": ["1"]}', "2 inputs and 1 outputs"),
        ('{"inputs": [5], "outputs": ["1"]}', "an input is int; write text"),
        ('{"inputs": ["1"], "outputs": [{"a": 1}]}', "an output is dict; write text"),
        ('{"inputs": [[1]], "outputs": ["1"]}', "an input is list; write text"),
        ('{"inputs": ["\\ud800"], "outputs": ["1"]}', "surrogates not allowed"),
        ('{"fn_name": "f", "inputs": [5], "outputs": [1]}', "an input is int; write a list of arguments"),
        ('{"fn_name": "f", "inputs": ["a b"], "outputs": [1]}', "Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ('{"fn_name": "f", "inputs": [[1]], "outputs": [' + "[" * 900 + "]" * 900 + "]}", "nested too deeply"),
    ],
)
def test_tests_that_cannot_be_read_say_why(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tests(text)


def test_a_program_s_output_is_compared_as_text() -> None:
    tests = parse_tests('{"inputs": ["x"], "outputs": ["é \\ufffd"]}')
    (test,) = tests.tests
    assert tests.is_passed(test, output="é \ufffd\n".encode(), returned=b"")
    assert not tests.is_passed(test, output="é ".encode() + b"\xff\n", returned=b"")  # no character is no other
    assert tests.is_passed(test, output="\u3000é\u00a0\ufffd\n\n".encode(), returned=b"")
    assert not tests.is_passed(test, output=b"", returned="é \ufffd".encode())


def test_a_function_s_value_is_compared_as_json() -> None:
    tests = parse_tests('{"fn_name": "f", "inputs": [[]], "outputs": [[1, 2.5]]}')
    (test,) = tests.tests
    assert tests.is_passed(test, output=b"", returned=b"[1.0, 2.5000000001]")
    for returned in (
        b"",
        b"[1, 2.5",
        b"[1, 2.5]]",
        b"[1, 2.5] [1, 2.5]",
        b"[1, NaN]",
        b"\xff",
        b"[" * 1000,
        b"9" * 5000,
    ):
        assert not tests.is_passed(test, output=b"[1, 2.5]", returned=returned)


def test_a_value_far_longer_than_the_expected_one_is_not_taken_apart() -> None:
    tests = parse_tests('{"fn_name": "f", "inputs": [[]], "outputs": [["ab"]]}')
    (test,) = tests.tests
    started = time.process_time()
    assert not tests.is_passed(test, output=b"", returned=b"[" + b"[]," * 5_000_000 + b"[]]")
    assert time.process_time() - started < 0.5
    assert tests.is_passed(test, output=b"", returned=b'[ "\\u0061\\u0062" ]')
