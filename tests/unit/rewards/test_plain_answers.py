"""Plain answers are compared as math-verify compares them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from latex2sympy2_extended.math_normalization import units

from rewards.math.answer_latex import to_latex
from rewards.math.math_answer import compare_by_math_verify
from rewards.math.plain_answers import are_equal_answers
from rewards.math.plain_latex import read_plain_latex

KINDS = [
    ("72", "number"),
    ("-72.50", "number"),
    (r"\frac{3\sqrt{2}}{4}", "number"),
    ("3x^2+2xy-1", "number"),
    (r"5 \text{ cm}^2", "number"),
    (r"90^\circ", "number"),
    (r"2\sin 3x", "number"),
    (r"e^{2x}", "number"),
    ("(x-1)(x+2)", "number"),
    ("[1,2)", "brackets"),
    (r"\left(1, \frac{1}{2}, x\right)", "brackets"),
    (r"(-\infty,2)\cup[3,\infty)", "union"),
    (r"\{1,2,3\}", "set"),
    ("1, 2", "set"),
    (r"\begin{bmatrix}1&2\\3&4\end{bmatrix}", "matrix"),
    ("x=3", "relation"),
    (r"x^2+y^2\le 1", "relation"),
    (r"12\%", "percentage"),
    (r"\text{no solution}", "word"),
    ("B", "word"),
]
NOT_PLAIN = [
    "",
    "2(3)",
    "5t",
    "x(y)",
    r"\pi(2)",
    "f(x)",
    "2^3^2",
    "(1,200)",
    r"\frac{1}{0}",
    r"\frac{1}{x-x}",
    "E",
]
NOT_PLAIN += [
    r"\sqrt{-1}",
    "i+x",
    "1/2x",
    "x_1",
    "|x|",
    "3!!",
    "2 3",
    r"5 \text{percent}",
    r"\text{pi}",
    r"2\frac{1}{2}x",
    "a.",
]
NOT_PLAIN += [
    r"\sin 2\sqrt{3}",
    r"\sin x \cos x",
    r"e^{0}",
    r"(\infty,2)",
    "9^{9^{9}}",
    "(" * 9 + "1" + ")" * 9,
    "x^23",
    "1.2.3",
]
PAIRS = [
    ("(x+1)^2", "x^2+2x+1", True),
    ("(x+1)^2", "x^2+1", False),
    (r"2\sqrt{2}", r"\sqrt{8}", True),
    (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}", True),
    ("2^{10}", "1024", True),
    ("y=2x+1", "1+2x", True),
    ("x=3", "y=3", False),
    (r"\{1,2\}", "2,1", True),
    ("[1,2)", "(1,2]", False),
    ("(1,2)", "(2,1)", False),
    (r"\text{Monday}", r"\text{ monday }", True),
    (r"\text{Monday}", "72", False),
    (r"\sqrt{2}", "1.414214", None),  # equal to six places: that takes math-verify
    ("2^{n+1}", r"2 \cdot 2^n", None),
    (r"\log_{2} 8", "3", None),
    ("(1,2)", r"\{1,2\}", None),
]


@pytest.mark.parametrize(("text", "kind"), KINDS)
def test_a_plain_text_is_read_as_what_it_is(text: str, kind: str) -> None:
    reading = read_plain_latex(text)
    assert reading is not None
    assert reading.kind == kind


@pytest.mark.parametrize("text", NOT_PLAIN)
def test_a_text_that_math_verify_may_read_otherwise_or_not_at_all_is_not_plain(text: str) -> None:
    assert read_plain_latex(text) is None


@pytest.mark.parametrize(("first", "second", "is_equal"), PAIRS)
def test_a_pair_is_equal_or_not_or_left_to_math_verify(first: str, second: str, is_equal: bool | None) -> None:
    assert are_equal_answers(first, second) is is_equal
    assert are_equal_answers(second, first) is is_equal


def test_no_unit_of_math_verify_is_made_of_letters_that_may_end_a_plain_text() -> None:
    for unit in units:
        for ending in ("", "s", "es"):
            assert read_plain_latex(f"3{unit}{ending}") is None, unit


def _wrap(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    two = st.tuples(inner, inner)
    return st.one_of(
        two.map(lambda xs: f"{xs[0]}+{xs[1]}"),
        two.map(lambda xs: f"{xs[0]} - {xs[1]}"),
        two.map(lambda xs: rf"{xs[0]} \cdot {xs[1]}"),
        two.map(lambda xs: f"{xs[0]}{xs[1]}"),
        two.map(lambda xs: rf"\frac{{{xs[0]}}}{{{xs[1]}}}"),
        inner.map(lambda x: f"({x})"),
        inner.map(lambda x: f"-{x}"),
        inner.map(lambda x: rf"\sqrt{{{x}}}"),
        inner.map(lambda x: f"({x})^2"),
        inner.map(lambda x: f"e^{{{x}}}"),
        inner.map(lambda x: rf"\sin({x})"),
    )


atoms = st.one_of(
    st.integers(0, 12).map(str),
    st.sampled_from(
        ["x", "y", "n", "a", r"\pi", "x^2", "2^n", r"\sqrt2", r"\frac12", "0.5", "1.5", "3!", r"2\frac{1}{2}", r"\ln 2"]
    ),
)
expressions = st.recursive(atoms, _wrap, max_leaves=4)
ends = st.one_of(
    st.integers(-3, 3).map(str), st.sampled_from([r"\frac{1}{2}", r"-\infty", r"\infty", "0.5", r"\sqrt{2}", "x"])
)
intervals = st.builds("{}{},{}{}".format, st.sampled_from("(["), ends, ends, st.sampled_from(")]"))
answers = st.one_of(
    expressions,
    intervals,
    st.lists(intervals, min_size=2, max_size=2).map(r"\cup ".join),
    st.lists(ends, min_size=1, max_size=3).map(lambda xs: rf"\{{{', '.join(xs)}\}}"),
    st.lists(ends, min_size=2, max_size=3).map(", ".join),
    st.lists(ends, min_size=4, max_size=4).map(lambda xs: r"\begin{{pmatrix}}{}&{}\\{}&{}\end{{pmatrix}}".format(*xs)),
    st.builds("{}{}{}".format, st.sampled_from("xy"), st.sampled_from(["=", "<", r"\ge "]), ends),
    st.builds("y={}".format, expressions),
    st.sampled_from(["A", "B", r"\text{yes}", r"\text{no}", r"50\%", r"5\%", r"5 \text{ cm}", r"30^\circ"]),
)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[str, str]:
    """An answer and one of the same kind, or itself, or itself with a character changed."""
    first = draw(answers)
    position = draw(st.integers(0, len(first) - 1))
    changed = first[:position] + draw(st.sampled_from("0123x+-()[]")) + first[position + 1 :]
    return first, draw(st.one_of(st.just(first), st.just(changed), st.just(changed), answers))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(pairs())
def test_any_pair_that_is_taken_has_the_verdict_of_math_verify(pair: tuple[str, str]) -> None:
    texts = [to_latex(text) for text in pair]
    if None in texts or any(r"\boxed{" in (text or "")[1:] for text in texts):
        return
    inner = [(text or "")[len(r"\boxed{") : -1] for text in texts]
    for answer, ground_truth in ((0, 1), (1, 0)):
        is_equal = are_equal_answers(inner[ground_truth], inner[answer])
        if is_equal is not None:
            verdict = compare_by_math_verify(pair[answer], pair[ground_truth]).verdict
            assert verdict == ("ok" if is_equal else "wrong")
