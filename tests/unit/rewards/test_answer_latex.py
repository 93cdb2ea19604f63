"""Test how answers are rewritten before math-verify reads them."""

import time

import pytest

from rewards.math.answer_latex import clean, to_latex


@pytest.mark.parametrize(
    ("answer", "latex"),
    [
        ("72", r"\boxed{72}"),
        (r"\frac{1}{23}", r"\boxed{\frac{1}{23}}"),
        ("it is $72$", "it is $72$"),
        (r"x = \boxed{5}", r"x = \boxed{5}"),
        ("1.5e-3", r"\boxed{\frac{15}{10000}}"),
        (r"2.5 \times 10^{3}", r"\boxed{2500}"),
        ("1e400", r"\boxed{1.0 \times 10^{400}}"),
        ("12 eggs", r"\boxed{12}"),
        ("12 dozen", r"\boxed{12 dozen}"),
        ("12 boxes and 3 bags", r"\boxed{12 boxes and 3 bags}"),
        ("No solution", r"\boxed{\text{No solution}}"),
        ("xy", r"\boxed{xy}"),
        ("3 1/2", r"\boxed{3\frac{1}{2}}"),
        ("1 234 567", r"\boxed{1234567}"),
        ("1,000/3", r"\boxed{1000/3}"),
        ("(1,000, 2)", r"\boxed{(1,000, 2)}"),
        (r"1.2\overline{34}", r"\boxed{\frac{1222}{990}}"),
        ("3:00 pm", r"\boxed{\text{3:00}}"),
        ("3:30", r"\boxed{3:30}"),
        ("2024-01-05", r"\boxed{\text{2024-01-05}}"),
        ("2√3", r"\boxed{2\sqrt{3}}"),
        (r"\varnothing", r"\boxed{\emptyset}"),
    ],
)
def test_a_notation_is_rewritten_so_that_it_is_read_whole(answer: str, latex: str) -> None:
    assert to_latex(answer) == latex


@pytest.mark.parametrize("answer", ["", "  ", ".", "1 2", "{5", "5}", r"\frac{1}{2", "}{"])
def test_an_answer_without_a_single_reading_has_no_latex(answer: str) -> None:
    assert to_latex(answer) is None


@pytest.mark.parametrize(
    "answer",
    [
        "72",
        " 72\n",
        "72.",
        "**72**",
        "**72.**",
        "$72$",
        "$72$.",
        r"\(72\)",
        r"\[72\]",
        r"\boxed{72}",
        "$$72$$",
        "72,",
        r"\boldsymbol{72}",
        r"\textcolor{red}72",
        "= 72",
        "+72",
        "€72",
    ],
)
def test_what_surrounds_an_answer_is_taken_off(answer: str) -> None:
    assert clean(answer) == "72"


@pytest.mark.parametrize(
    "answer",
    [
        "$1$ and $2$",
        "$$1$$ $$2$$",
        "1,2,",
        r"72\,",
        r"\bm{7}\bm{2}",
        r"\boxed{1} or \boxed{2}",
        r"\(1\), \(2\)",
        r"\$",
        "{72}",
        "72..",
    ],
)
def test_what_belongs_to_an_answer_stays(answer: str) -> None:
    assert clean(answer) == answer


@pytest.mark.parametrize(
    "part",
    [
        *("1,", "1 ", "a ", "$", r"\,", "{,}", "*", "(", r"\boxed{", "1e", "√", "x.", "1/", "- ", "$$", "$1$ "),
        *(r"\bm{", r"\bf ", r"\cos 1^\circ ", r"\sin(1^\circ+", r"\sin^{2} ", "\u00be", "\u00b2"),
    ],
)
def test_a_thousand_characters_of_anything_take_less_than_ten_milliseconds_of_cpu_time(part: str) -> None:
    text = (part * 1000)[:1000]
    assert min(seconds_of(text) for _ in range(5)) < 0.01  # 0.3 ms here


def seconds_of(answer: str) -> float:
    started = time.process_time()
    to_latex(answer)
    return time.process_time() - started
