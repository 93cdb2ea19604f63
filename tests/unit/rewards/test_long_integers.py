"""Test integers of more digits than Python converts, in the tests of a function and in what it returns."""

import json
import time

import pytest

from rewards.code.code_tests import parse_tests

LONG = 5000 * "7"


@pytest.mark.parametrize("outputs", [LONG, f"[{LONG}, 1.5]", f'{{"a": -{LONG}}}', f"(True, {LONG})"])
def test_an_integer_that_is_expected_may_have_more_digits_than_python_converts(outputs: str) -> None:
    tests = parse_tests(json.dumps({"fn_name": "f", "inputs": [LONG], "outputs": [outputs]}))
    returned = outputs.replace("(True", "[true").replace(")", "]")
    assert tests.tests[0].stdin.decode() == f"[{LONG}]"
    assert tests.is_passed(tests.tests[0], output=b"", returned=returned.encode())
    for other in (returned.replace("777", "776", 1), returned.replace(LONG, "7"), returned.replace(LONG, f'"{LONG}"')):
        assert not tests.is_passed(tests.tests[0], output=b"", returned=other.encode())


@pytest.mark.full
def test_an_integer_as_long_as_can_be_is_told_apart_at_once() -> None:
    tests = parse_tests(json.dumps({"fn_name": "f", "inputs": [[1]], "outputs": [json.dumps([1.5] * 300_000)]}))
    started = time.process_time()
    assert not tests.is_passed(tests.tests[0], output=b"", returned=b"9" * (1 << 24))
    assert time.process_time() - started < 2


def test_integers_in_a_list_of_arguments_may_have_more_digits_than_python_converts() -> None:
    tests = parse_tests(f'{{"fn_name": "f", "inputs": [[{LONG}, 1]], "outputs": [{LONG}]}}')
    assert tests.tests[0].stdin.decode() == f"[{LONG}, 1]"
    assert tests.is_passed(tests.tests[0], output=b"", returned=LONG.encode())
    with pytest.raises(ValueError, match="Exceeds the limit"):
        int(LONG)  # Python's limit holds elsewhere
