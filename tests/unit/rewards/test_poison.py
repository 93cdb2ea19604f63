"""What would take math-verify seconds is recognised at once, and what would not is let through."""

import importlib.util
import time
from pathlib import Path

import pytest

from rewards.math.poison import MAX_LENGTH, find_poison

CORPUS = Path(__file__).parents[3] / "scripts" / "bench" / "math_corpus.py"
POISON = {
    "digits": [
        "9^{9^{9^9}}",
        "10^{10^{10}}",
        r"2^{2^{2^{2^{2^2}}}}",
        r"\left(\frac{1}{3}\right)^{10^7}",
        "2^{-10^8}",
        "x^{9^{9^9}}",
        "2^{99999999}",
        r"\sqrt{2^{10^7}}",
        r"7^{1000000000} \bmod 10",
        "2^{50!}",
    ],
    "factorial": ["1000000!", "20!!", "5!!!!", "(10^7)!", "((10!)!)!", r"\frac{1000000!}{999999!}"],
    "binomial coefficient": [r"\binom{1000000}{500000}", r"\binom{10^9}{5 \cdot 10^8}"],
    "sum or a product": [r"\sum_{k=1}^{1000000} \frac{1}{k}", r"\prod_{k=1}^{10^9} k"],
    "exponent": ["(x+1)^{2000}", r"(1+\sqrt{2})^{100000}"],
    "multiplied out": ["(a+b+c+d)^{20}(x+y)^{20}", "(a+b+c+d+f+g+h)^{30}"],
    "nested": ["(" * 100 + "1" + ")" * 100, "{" * 40 + "1" + "}" * 40, r"\sqrt{1+" * 12 + "1" + "}" * 12],
    "tower": ["x^{x^{x^{x^{x^{x^{x}}}}}}", "x^x^x^x^x^x^x^x"],
    "parts": ["x^2+" * 60 + "1", r"\sin x" * 20, "+".join(["2"] * 300), "|" * 80],
    "longer": ["(" * 2000 + ")" * 2000, "9" * (MAX_LENGTH + 1), "word " * 300],
    "determinant": [r"\begin{vmatrix}" + r"\\".join(["a&b&c&d&f"] * 5) + r"\end{vmatrix}"],
    "matrix": [r"\operatorname{zeros}(1000,1000)"],
}
HARMLESS = r"""
72 2^{100} 10^{18} 10^{-18} 2^{1000} 9^9 100! 1000! 5!! \binom{20}{10} \binom{100}{50} \binom{10^9}{2} (x+1)^{100}
(a+b+c)^{10} \sum_{k=1}^{100}k \sum_{k=1}^{n}k \prod_{k=1}^{\infty}\frac{1}{k} 2^{2^{2^2}} e^{x^2} e^{10^{10}}
x^{10^9} 1.05^{100} 1^{10^9} (-1)^{10^9} \frac{100!}{98!} \frac{2^{100}-1}{2^{50}} 3^{\frac{1}{1000}} \sqrt[3]{2}
2^{64}-1 2^{1+2+3+4+5+6+7+8+9+10} \begin{pmatrix}1&2&3\\4&5&6\\7&8&9\end{pmatrix}
\begin{vmatrix}1&2&3\\4&5&6\\7&8&9\end{vmatrix} 2023^{2022} 7^{2^{10}} \frac{-1+\sqrt{1+\frac{4}{x^{2}}}}{2}
\left(\frac{1}{2},\frac{\sqrt{3}}{2}\right) \cos\frac{2\pi}{7}\cos\frac{4\pi}{7} \cos\frac{6\pi}{7}
\sqrt{2+\sqrt{2+\sqrt{2+\sqrt{2}}}} \frac{1}{1+\frac{1}{1+\frac{1}{2}}} )) ((! ^ ! ^^ \ \frac {{ 0^{0}
""".split()  # noqa: SIM905 - sixty expressions are easier to read so


@pytest.mark.parametrize(("reason", "text"), [(reason, text) for reason, texts in POISON.items() for text in texts])
def test_poison_is_recognised_for_its_reason(reason: str, text: str) -> None:
    assert reason in (find_poison(text) or "")


@pytest.mark.parametrize("text", [*HARMLESS, ",".join(str(n) for n in range(99)), r"\text{" + "a word " * 50 + "}"])
def test_an_answer_of_ordinary_size_is_no_poison(text: str) -> None:
    assert find_poison(text) is None


def test_no_answer_of_a_corpus_of_many_kinds_is_poison() -> None:
    spec = importlib.util.spec_from_file_location("math_corpus", CORPUS)
    assert spec is not None
    assert spec.loader is not None
    corpus = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(corpus)
    pairs = corpus.make_pairs(2000, seed=1)
    assert [pair for pair in pairs if find_poison(pair.answer) or find_poison(pair.ground_truth)] == []


@pytest.mark.parametrize(
    "part",
    [
        "(",
        "{1}",
        "1+",
        "x^",
        "2^{3}",
        r"\frac{1}{2}+",
        "!",
        "5!",
        "9",
        "a",
        r"\frac",
        r"\sqrt[",
        "(a+b)^{2}",
        "1,",
        "^",
    ],
)
def test_a_text_of_any_shape_is_judged_in_one_pass(part: str) -> None:
    text = (part * MAX_LENGTH)[:MAX_LENGTH]
    # A thousandth of a second on an idle core, as scripts/bench/math_rewards.py shows; a busy one has its time.
    assert min(_seconds(text) for _ in range(5)) < 0.05
    assert min(_seconds(part * 1_000_000) for _ in range(5)) < 0.05


def _seconds(text: str) -> float:
    started = time.perf_counter()
    find_poison(text)
    return time.perf_counter() - started
