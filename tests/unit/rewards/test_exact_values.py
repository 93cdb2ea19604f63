r"""Test that values that differ are not equal, however small or close they are, and that equal ones stay equal."""

import time

import math_verify
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy import Add, Expr, Integer, Mul, Pow, Rational, exp, factorial, pi, sqrt

from rewards.math.exact_values import are_different
from rewards.math.math_answer import check_answer
from tests.cases import one_of
from tests.examples import examples

integers = st.integers(1, 10**30)


def product(*factors: Expr) -> Expr:
    """Return a product that sympy has not evaluated, as formulas are before they are compared."""
    return Mul(*factors, evaluate=False)


def power(base: int, exponent: int) -> Expr:
    return Pow(Integer(base), Integer(exponent), evaluate=False)


@examples(60)
@given(
    top=integers,
    bottom=integers,
    magnitude=st.integers(-300, 300),
    error=st.integers(12, 40),
    sign=st.sampled_from([1, -1]),
)
def test_fractions_with_a_relative_difference_of_any_size_are_different(
    top: int, bottom: int, magnitude: int, error: int, sign: int
) -> None:
    value = product(Rational(top, bottom), power(10, magnitude))
    factor = 1 + sign * Rational(1, 10**error)
    assert are_different(value, product(value, factor))
    assert not are_different(value, product(value, factor, 1 / factor))
    for irrational in (sqrt(2), pi, exp(1)):
        assert are_different(product(value, irrational), product(value, irrational, factor))


@examples(60)
@given(a=st.integers(2, 30), b=st.integers(1, 30), exponent=st.integers(-60, 60))
def test_a_factored_and_an_expanded_form_are_equal_and_one_with_a_factor_more_is_not(
    a: int, b: int, exponent: int
) -> None:
    root = 1 + sqrt(b)
    factored = product(power(a, exponent), Add(Integer(a), Integer(b), evaluate=False))
    expanded = Add(power(a, exponent + 1), product(Integer(b), power(a, exponent)), evaluate=False)
    assert not are_different(factored, expanded)
    assert are_different(factored, product(expanded, Integer(a)))
    assert not are_different(product(factored, root, root), product(expanded, 1 + 2 * sqrt(b) + b))
    assert are_different(product(factored, root, root), product(expanded, 2 + 2 * sqrt(b) + b))


DIFFERENT = [
    (r"1-\frac{365!}{342!\cdot 365^{23}}", r"1-\frac{365!}{343!\cdot 365^{22}}"),
    (r"\frac{2^{100}-1}{2^{100}}", r"\frac{1}{2^{100}}"),
    (r"\frac{2^{63}+1}{3\cdot 2^{64}}", r"\frac{1}{3\cdot 2^{64}}"),
    ("10^{-20}", "10^{-30}"),
    (r"\frac{1}{2^{55}}", r"\frac{1}{2^{56}}"),
    (r"\frac{7}{2^{98}}", r"\frac{1}{2^{98}}"),
    (r"\frac{1}{19!}", r"\frac{1}{20!}"),
    ("1-2^{-98}", "1-2^{-99}"),
    ("1-2^{-9999}", "1-2^{-9998}"),
    (r"\frac{1}{100000!}", r"\frac{1}{100001!}"),
    (r"\frac{\binom{60}{30}}{2^{120}}", r"\frac{\binom{60}{29}}{2^{120}}"),
    (r"1.5 \times 10^{-50}", r"1.5 \times 10^{-60}"),
    ("10^{-20}", "0.0"),
    ("10^{-20}", "0.0000000001"),
    (r"\frac{1}{3000000}", "0.00000033"),
    (r"\frac{\sqrt{2}}{2^{55}}", r"\frac{\sqrt{3}}{2^{55}}"),
    (r"\frac{\pi}{10^{600}}", r"\frac{\pi}{10^{700}}"),
    (r"\frac{(2+\sqrt{3})^{100}+(2-\sqrt{3})^{100}}{2}", r"\frac{(2+\sqrt{3})^{100}}{2}"),
    ("e^{-40}", "e^{-41}"),
    (r"\arctan(10^{-30})", r"\arctan(10^{-31})"),
    (r"\log_2(1+10^{-30})", r"\log_2(1+10^{-31})"),
    (r"\sum_{k=1}^{9} \frac{k}{10^{20}}", r"\frac{44}{10^{20}}"),
    (r"\prod_{k=1}^{50}\frac{1}{k}", r"\frac{1}{51!}"),
    (r"\sqrt{2}+i\cdot 10^{-30}", r"\sqrt{2}+i\cdot 10^{-31}"),
    (r"x+\frac{1}{2^{55}}", r"x+\frac{1}{2^{56}}"),
    (r"x^{10^9}+10^{-20}", "x^{10^9}"),
    (r"f(x)+10^{-20}", "f(x)"),
    (r"x^{x^{x^x}}+10^{-20}", "x^{x^{x^x}}"),
    (r"\frac{n!}{10^{30}}", r"\frac{n!}{10^{31}}"),
    (r"\int_0^1 \frac{x^2}{10^{30}} dx", r"\frac{1}{2\cdot 10^{30}}"),
    (r"10^{-30}\tan x", r"10^{-31}\tan x"),
    (r"x=\frac{1}{2^{55}}", r"x=\frac{1}{2^{56}}"),
    (r"x<\frac{1}{2^{55}}", r"x<\frac{1}{2^{56}}"),
    (r"\{\frac{1}{2^{55}}\}", r"\{\frac{1}{2^{56}}\}"),
    (r"(\frac{1}{2^{55}},1)", r"(\frac{1}{2^{56}},1)"),
    (r"[\frac{1}{2^{55}},1)", r"[\frac{1}{2^{56}},1)"),
    (r"\begin{pmatrix}\frac{1}{2^{55}}\\1\end{pmatrix}", r"\begin{pmatrix}\frac{1}{2^{56}}\\1\end{pmatrix}"),
]


@pytest.mark.parametrize(("first", "second"), one_of(2, DIFFERENT))
def test_values_that_are_smaller_or_closer_than_a_double_can_tell_are_different(first: str, second: str) -> None:
    assert check_answer(second, first).verdict == "wrong"


@pytest.mark.full
@pytest.mark.parametrize(("first", "second"), [*DIFFERENT, ("1-2^{-999999}", "1-2^{-999998}")])
def test_which_of_two_different_values_is_the_ground_truth_does_not_matter(first: str, second: str) -> None:
    assert check_answer(first, second).verdict == "wrong"
    assert check_answer(first, first.replace("^", " ^ ")).verdict == "ok"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [
        (r"1-\frac{365!}{342!\cdot 365^{23}}", r"1-\frac{364!}{342!\cdot 365^{22}}"),
        (r"\frac{2^{63}+1}{3\cdot 2^{64}}", r"\frac{1}{6}+\frac{1}{3\cdot 2^{64}}"),
        (r"\frac{1}{2^{55}}", "2^{-55}"),
        (r"\frac{5000!}{4999!}", "5000"),
        (r"\frac{\sqrt{2}\sqrt{3}}{2^{60}}", r"\frac{\sqrt{6}}{2^{60}}"),
        (r"\frac{(1+\sqrt{5})^{60}}{2^{60}}", r"(\frac{1+\sqrt{5}}{2})^{60}"),
        (r"\frac{1}{10^{700}\sqrt{2}}", r"\frac{\sqrt{2}}{2\cdot 10^{700}}"),
        (r"\int_0^1 \frac{x^2}{10^{30}} dx", r"\frac{1}{3\cdot 10^{30}}"),
        (r"\prod_{k=1}^{50}\frac{1}{k}", r"\frac{1}{50!}"),
        ("1e-7", "0.0000001"),
        (r"\frac{1}{30000000}", "0.0000000333333"),
        (r"0.5\sqrt{2}", r"\frac{\sqrt{2}}{2}"),
        (r"2.5\% \cdot \sqrt{2}", r"\frac{\sqrt{2}}{40}"),
        (r"\frac{1}{\sqrt{n}}", r"\sqrt{1/n}"),
        (r"\frac{1}{\sqrt{n(n+1)}}", r"\sqrt{\frac{1}{n(n+1)}}"),
        (r"\frac{2}{\sqrt[3]{n}}", r"\sqrt[3]{\frac{8}{n}}"),
        ("|x|", r"\sqrt{x^2}"),
    ],
)
def test_equal_values_of_another_form_stay_equal(ground_truth: str, answer: str) -> None:
    assert check_answer(answer, ground_truth).verdict == "ok"


@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [("x", r"\sqrt{x^2}"), (r"\frac{1}{x}", r"\sqrt{\frac{1}{x^2}}"), (r"\frac{1}{n}", r"\sqrt{1/n}")],
)
def test_a_root_of_a_square_is_not_its_base(ground_truth: str, answer: str) -> None:
    assert check_answer(answer, ground_truth).verdict == "wrong"


@pytest.mark.full
def test_the_work_to_tell_large_expressions_apart_is_bounded() -> None:
    terms = [
        [factorial(10_000 + number, evaluate=False) for number in range(30)],
        [power(7, 99_999 + number) for number in range(30)],
        [product(sqrt(2), power(7, -(10**6) - number)) for number in range(30)],
    ]
    for parts in terms:
        started = time.process_time()
        are_different(Add(*parts, evaluate=False), Add(*parts[1:], evaluate=False))
        assert time.process_time() - started < 2


def test_other_code_of_the_process_gets_math_verify_s_own_comparison() -> None:
    assert check_answer(r"\frac{1}{2^{56}}", r"\frac{1}{2^{55}}").verdict == "wrong"
    pair = (
        math_verify.parse(rf"${text}$", parsing_timeout=None) for text in (r"\frac{1}{2^{55}}", r"\frac{1}{2^{56}}")
    )
    assert math_verify.verify(*pair, timeout_seconds=None)
