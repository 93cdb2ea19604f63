r"""The short cuts of math answers: whatever they decide, math-verify decides the same."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.math.math_answer import check_answer, clear_caches, compare_by_math_verify
from rewards.math.poison import find_poison
from tests.unit.rewards.test_math_answer_table import RIGHT

INTEGERS = st.integers(-(10**7), 10**7)
DECIMALS = st.decimals(-(10**5), 10**5, places=3).map(str) | st.decimals(-2, 2, places=7).map(str)
FRACTIONS = st.builds(lambda upper, lower: rf"\frac{{{upper}}}{{{lower}}}", st.integers(-200, 200), st.integers(1, 200))
SLASHED = st.builds(lambda upper, lower: f"{upper}/{lower}", st.integers(-200, 200), st.integers(1, 200))
NUMBERS = st.one_of(INTEGERS.map(str), INTEGERS.map("{:,}".format), DECIMALS, FRACTIONS, SLASHED)


def assert_same_verdict(answer: str, truth: str) -> None:
    clear_caches()
    assert check_answer(answer, truth).verdict == compare_by_math_verify(answer, truth).verdict


@settings(max_examples=300, deadline=None)
@given(NUMBERS, NUMBERS)
def test_the_verdict_on_two_numbers_is_math_verifys(first: str, second: str) -> None:
    assert_same_verdict(first, second)


@settings(max_examples=200, deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(1, 10**4), st.integers(1, 9))
def test_the_verdict_on_a_fraction_and_its_decimals_is_math_verifys(upper: int, lower: int, places: int) -> None:
    decimals = f"{float(Fraction(upper, lower)):.{places}f}"
    assert_same_verdict(decimals, rf"\frac{{{upper}}}{{{lower}}}")
    assert_same_verdict(f"{upper}/{lower}", decimals)


@settings(max_examples=200, deadline=None)
@given(st.text("0123456789.,-+/ $%eE", min_size=1, max_size=8), NUMBERS)
def test_the_verdict_on_what_only_looks_like_a_number_is_math_verifys(text: str, number: str) -> None:
    if find_poison(text) is None:
        assert_same_verdict(text, number)
        assert_same_verdict(number, text)


@pytest.mark.parametrize(
    "text",
    [
        "9^{9^{9^9}}",
        r"9^{9^{9^9}}+1",
        "{" * 400 + "5" + "}" * 400,
        "(" * 300 + "5" + ")" * 300,
        "9" * 5000,
        "2^{10000000}",
        "1000000!",
        "20!!!",
        "(x+1)^{5000}",
        r"\sum_{k=1}^{1000000000} k^k",
        r"\binom{1000000}{500000}",
        r"\frac{1}{9^{9^{9}}}",
    ],
)
def test_poison_is_recognised_and_invalid_as_answer_and_as_ground_truth(text: str) -> None:
    assert check_answer(text, "5").verdict == "invalid"
    assert check_answer("5", text).verdict == "invalid"


@pytest.mark.parametrize(
    "text",
    [
        "2^{100}",
        "10^{18}",
        "100!",
        r"\binom{20}{10}",
        "(x+1)^{10}",
        r"\sum_{k=1}^{100} k",
        "2^{2^{3}}",
        r"\sqrt{2^{10}}",
    ]
    + [truth for _, truth, _ in RIGHT],
)
def test_answers_that_people_give_are_no_poison(text: str) -> None:
    assert find_poison(text) is None
