"""Which answers mean the same, and which only look like it. Ground truth first, answer second."""

import pytest

from rewards.math_answer import check_answer, to_latex

EQUAL = [
    # numbers
    ("72", "72"),
    ("72", " 72 "),
    ("72", "72."),
    ("72", "072"),
    ("72", "72.0"),
    ("72", "+72"),
    ("72", "**72**"),
    ("72", "$72$"),
    ("72", r"\text{72}"),
    ("72", r"\mathbf{72}"),
    ("72", "x = 72"),
    ("72", r"72 \text{ cm}"),
    ("18", "$18"),
    ("18", r"\$18"),
    ("-3", "\N{MINUS SIGN}3"),
    ("5", "The answer is $5$"),
    ("5", r"\boxed{5}"),
    ("6", "3!"),
    ("5", "2+3"),
    # thousands separators
    ("1000", "1,000"),
    ("1,000", "1000"),
    ("1000000", "1,000,000"),
    ("1000", "1{,}000"),
    ("1000", r"1\,000"),
    ("1000", r"1,\!000"),
    ("1234567", "1 234 567"),
    ("5000.5", "5,000.50"),
    # powers of ten, as str() writes small JSON numbers
    ("1e-05", "0.00001"),
    ("0.00001", "1e-05"),
    ("1000", "1e3"),
    ("1000000", "10^6"),
    # fractions and decimals
    ("1/2", "0.5"),
    ("0.5", "1/2"),
    ("0.5", r"\frac{1}{2}"),
    ("0.5", r"\frac12"),
    ("0.5", r"\frac 1 2"),
    ("3/4", r"\dfrac{3}{4}"),
    ("1/3", "0.333333"),
    ("3.5", "3 1/2"),
    ("3 1/2", r"3\frac{1}{2}"),
    # percentages: math-verify takes 50% for 0.5 and for 50
    ("50%", "0.5"),
    ("0.5", r"50\%"),
    ("50", "50%"),
    # angles, roots, symbols
    (r"90^\circ", "90"),
    (r"2\sqrt{2}", r"\sqrt{8}"),
    (r"\infty", r"\infty"),
    ("x^2+1", "1+x^2"),
    ("y=2x+1", "2x+1=y"),
    # collections
    ("1,2", "2,1"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("(1,2)", r"\left( 1, 2 \right)"),
    ("(1, 200)", r"(1,\ 200)"),
    ("1 < x < 2", "(1,2)"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    # words
    ("Monday", "monday"),
    ("Monday", r"\text{Monday}"),
    (r"\text{no solution}", "no solution"),
    ("A", "(A)"),
    (r"\text{(A)}", "A"),
]

DIFFERENT = [
    (r"\frac{1}{23}", r"\frac{12}{3}"),  # equal once braces are stripped
    (r"\frac{12}{3}", r"\frac{1}{23}"),
    ("12", "1,2"),  # equal once commas are stripped
    ("1,2", "12"),
    ("100", "1,00"),
    ("1000", "1,0000"),
    ("1200", r"(1,\ 200)"),
    ("0", r"1\,000"),  # math-verify's own reading of a thin space is a product
    ("72", "7"),
    ("72", "-72"),
    ("72", "172"),
    ("72", "72.5"),
    ("3", "1 2"),  # math-verify adds them up
    ("11", "5\n\n6"),
    ("2", "3 1/2"),
    ("0.1", "10"),
    ("0.5", "5%"),
    ("1/3", "0.33"),
    ("1.5", "1,5"),
    (r"\pi", "3.14"),
    ("2", r"2\pi"),
    (r"\infty", r"-\infty"),
    ("i", "-i"),
    ("x^2+1", "x^2+2"),
    ("x=5", "y=5"),
    ("12", "12 and 13"),
    ("5", "5 or 6"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    (r"\{1,2\}", r"\{1,2,3\}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}"),
    ("listen", "silent"),  # the same letters
    ("even", "odd"),
    ("yes", "no"),
    ("A", "B"),
    ("5", "1/0"),
]

UNREADABLE = ["", "   ", r"\frac{", r"\frac{12}{3", "5}", "{5", "1 2", r"5 \frac{"]


@pytest.mark.parametrize(("ground_truth", "answer"), EQUAL)
def test_an_answer_of_the_same_value_is_ok(ground_truth: str, answer: str) -> None:
    assert check_answer(answer, ground_truth).verdict == "ok"


@pytest.mark.parametrize(("ground_truth", "answer"), DIFFERENT)
def test_an_answer_of_another_value_is_wrong(ground_truth: str, answer: str) -> None:
    assert check_answer(answer, ground_truth).verdict == "wrong"


@pytest.mark.parametrize("answer", UNREADABLE)
def test_an_answer_that_does_not_parse_is_wrong(answer: str) -> None:
    decision = check_answer(answer, "5")
    assert decision.verdict == "wrong"
    assert "does not parse" in decision.detail


@pytest.mark.parametrize("answer", ["5", r"\frac{", None])
@pytest.mark.parametrize("ground_truth", [*UNREADABLE, "1/0"])
def test_a_broken_ground_truth_is_invalid_for_every_answer(ground_truth: str, answer: str | None) -> None:
    decision = check_answer(answer, ground_truth)
    assert decision.verdict == "invalid"
    assert decision.detail.startswith("the ground truth")


def test_a_missing_answer_is_wrong() -> None:
    assert check_answer(None, "5").verdict == "wrong"


def test_a_comparison_that_fails_is_invalid_and_names_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(gold: object, answer: object) -> bool:
        raise NotImplementedError("no such function")

    monkeypatch.setattr("rewards.math_answer._verify", fail)
    decision = check_answer("41.125", "42.875")
    assert decision.verdict == "invalid"
    assert decision.detail == "the comparison failed: NotImplementedError: no such function"


def test_an_explanation_is_one_short_line() -> None:
    detail = check_answer("5\n" + "+1" * 1000, "5").detail
    assert "\n" not in detail
    assert len(detail) < 200


def test_an_answer_is_read_whole_as_one_latex_expression() -> None:
    assert to_latex("72") == r"\boxed{72}"
    assert to_latex(r"\frac{1}{23}") == r"\boxed{\frac{1}{23}}"
    assert to_latex("it is $72$") == "it is $72$"
    assert to_latex("1.5e-3") == r"\boxed{1.5 \times 10^{-3}}"
