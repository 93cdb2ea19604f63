"""Test that the faster parser reads whole answers as math-verify does."""

import pytest
from math_verify import LatexExtractionConfig, parse
from sympy import srepr

from rewards.math.latex_reader import read_latex

TEXTS = [
    "72", "-3", "0.5", "1,000", "1/2", r"\frac{1}{2}", r"2\sqrt{2}", r"\sqrt[3]{5}", "x^2+1", "x_1", "a_{12}^2",
    "3x^{n+1}", "(1,2)", "[1,2)", "(1,2,3)", r"\{1,2\}", "1,2,3", "x=5", "y=2x+1", "x<2", r"1<x\le2", r"x\ne3",
    "(x-2)(x+3)", "n(n+1)", r"(-\infty,2)\cup(3,\infty)", r"50\%", "12.5%", r"\text{Monday}", r"\pi", r"3\pi/4",
    r"\sin(x)", r"\sin^{2}x", r"\log_{2}8", r"\ln(2)", "e^{2x}", "|x-1|", r"\lfloor2.5\rfloor", r"\binom{5}{2}", "5!",
    r"90^\circ", "3+4i", "f(x)=x^2", r"\pm2", r"x\in\{1,2\}", r"\mathbb{R}", r"\emptyset", "a=b=c",
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{vmatrix}1&2\\3&4\end{vmatrix}", r"2\frac{1}{2}",
    r"\sum_{k=1}^{n}k", r"\int_0^1x\,dx", "2(3)", "5 cm", "5t^2",
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", TEXTS)
def test_the_expression_is_the_one_that_math_verify_makes(text: str) -> None:
    config = (LatexExtractionConfig(boxed_match_priority=0),)
    (expected,) = parse(rf"\boxed{{{text}}}", config, fallback_mode="no_fallback", parsing_timeout=None)
    assert srepr(read_latex(rf"\boxed{{{text}}}")) == srepr(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5t", "5*t"),
        ("5 h", "5*h"),
        (r"\pi r^2 h", "pi*h*r**2"),
        (r"\cos t", "cos(t)"),
        ("3ab", "3*a*b"),
        (r"\frac{1}{2} gs", "g*s/2"),
        ("5cm", "5"),
        ("4 sq m", "4"),
        (r"5\text{ h}", "5"),
    ],
)
def test_letters_at_the_end_are_factors_unless_they_can_only_be_a_unit(text: str, expected: str) -> None:
    assert str(read_latex(rf"\boxed{{{text}}}")) == expected


@pytest.mark.parametrize(
    "text", [r"\frac{", r"1, \frac{1}{2}, ,", "5)", "the answer [5] (", "", r"\frac{1}{2} ( of it"]
)
def test_text_that_does_not_parse_as_a_whole_is_nothing(text: str) -> None:
    assert read_latex(rf"\boxed{{{text}}}") is None


def test_of_a_chain_that_does_not_parse_the_last_side_counts_as_in_math_verify() -> None:
    assert read_latex(r"\boxed{ab( = cd( = 7}") == 7


@pytest.mark.full
def test_text_too_deep_for_the_parser_raises() -> None:
    with pytest.raises(RecursionError):
        read_latex(r"\boxed{" + "-" * 400 + "1}")
