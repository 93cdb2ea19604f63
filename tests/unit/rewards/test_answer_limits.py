"""Test that answers that are too long, too deep or have large exponents are refused before math-verify reads them."""

import time

import pytest

from rewards.math.answer_latex import to_latex
from rewards.math.answer_limits import MAX_LENGTH, exceeded_limit
from rewards.math.math_answer import check_answer, clear_caches
from tests.unit.rewards.test_math_answer_table import RIGHT

OVER_A_LIMIT = {
    "longer": ["(" * 2000 + ")" * 2000, "9" * (MAX_LENGTH + 1), "word " * 300, "°" * MAX_LENGTH],
    "nested": ["(" * 100 + "1" + ")" * 100, "{" * 40 + "1" + "}" * 40, r"\sqrt{1+" * 12 + "1" + "}" * 12, "[" * 400],
    "exponent": [
        "1e999999999",
        "-2.5e-999999999",
        r"1 \times 10^{999999999}",
        "10^999999999",
        "9^{9^{9^9}}",
        r"9^{9^{9^9}}+1",
        "10^{10^{10}}",
        r"2^{2^{2^{2^{2^2}}}}",
        "2" + "^{2" * 8 + "}" * 8,
        r"9^{\left(9^9\right)}",
        r"\left(\frac{1}{3}\right)^{10^7}",
        "2^{-10^8}",
        "2^{99999999}",
        r"\sqrt{2^{10^7}}",
        "x^{9^{9^9}}",
        "5!^{9^9}",
        r"7^{1\,000\,000\,000} \bmod 10",
    ],
}
HARMLESS = r"""
72 2^{100} 10^{18} 10^{-18} 2^{1000} 9^9 100! 5!! \binom{20}{10} (x+1)^{100} \sum_{k=1}^{100}k 2^{2^{2^2}} 2^{2^{16}}
e^{x^2} e^{10^{10}} x^{10^9} 1.05^{100} 2023^{2022} 7^{2^{10}} 2^{1000000} 10^{10^6} \sqrt{2+\sqrt{2+\sqrt{2+\sqrt{2}}}}
\frac{1}{1+\frac{1}{1+\frac{1}{2}}} \begin{pmatrix}1&2&3\\4&5&6\\7&8&9\end{pmatrix} )) ((! ^ ! ^^ \ \frac 0^{0} 1e400
""".split()  # noqa: SIM905 - thirty expressions are easier to read so


@pytest.mark.parametrize(
    ("reason", "text"), [(reason, text) for reason, texts in OVER_A_LIMIT.items() for text in texts]
)
def test_an_answer_over_a_limit_is_invalid_at_once_as_answer_and_as_ground_truth(reason: str, text: str) -> None:
    clear_caches()
    started = time.process_time()
    answer, ground_truth = check_answer(text, "72"), check_answer("72", text)
    assert time.process_time() - started < 0.1
    assert answer.verdict == ground_truth.verdict == "invalid"
    assert answer.detail.startswith("the answer ")
    assert ground_truth.detail.startswith("the ground truth ")
    for decision in (answer, ground_truth):
        assert " cannot be compared: it " in decision.detail
        assert reason in decision.detail


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", [*HARMLESS, *dict.fromkeys(truth for _, truth, _ in RIGHT)])
def test_an_answer_of_ordinary_size_exceeds_no_limit(text: str) -> None:
    assert exceeded_limit(to_latex(text) or text) is None


@pytest.mark.parametrize(
    ("at_the_limit", "beyond"),
    [
        ("1" * MAX_LENGTH, "1" * (MAX_LENGTH + 1)),
        ("(" * 10 + "1" + ")" * 10 + "()", "(" * 11 + "1" + ")" * 11),
        ("10^{1000000}", "10^{1000001}"),
        ("2^{10^6}", "2^{10^6}+3^{101^3}"),
        ("3^{2^{19}}", "3^{2^{20}}"),
    ],
)
def test_a_limit_itself_is_allowed(at_the_limit: str, beyond: str) -> None:
    assert exceeded_limit(at_the_limit) is None
    assert exceeded_limit(beyond) is not None


@pytest.mark.parametrize("part", ["(", "{1}", "x^", "1^", "2^{3}", "9^{", "^{(", "9", "9 ", r"\left", "1^1^"])
def test_a_text_of_any_shape_is_judged_in_milliseconds(part: str) -> None:
    text = (part * MAX_LENGTH)[:MAX_LENGTH]
    # Less than 2 ms on an idle core; a busy one has its time.
    assert min(_seconds(text) for _ in range(5)) < 0.05
    assert min(_seconds(part * 1_000_000) for _ in range(5)) < 0.05


def _seconds(text: str) -> float:
    started = time.perf_counter()
    exceeded_limit(text)
    return time.perf_counter() - started
