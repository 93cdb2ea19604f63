"""Test equal and similar answers by kind, in rows of ground truth, correct answers and wrong ones."""

import pytest

from rewards.math.answer_latex import clean
from rewards.math.math_answer import check_answer, compare_by_math_verify
from rewards.math.plain_numbers import read_plain_number

TABLE: dict[str, list[tuple[str, list[str], list[str]]]] = {
    "integers": [
        ("72", ["\uff17\uff12", "\uff17\uff12\uff0e\uff10"], ["\uff17"]),
        ("72", ["72,", "72;", "$72,$", r"72\,", "$$72$$"], ["72,7", "7,2", ",72,", "72,,"]),
        ("72", [" 72 ", "72.", "072", "72.0", "+72", "**72**", "$72$", r"\(72\)", r"\boxed{72}"], ["7", "172", "72.5"]),
        ("5", ["The answer is $5$", "2+3", r"\text{5}", r"\mathbf{5}"], ["12 and 5", "5 or 6", "5\n\n6", "1/0"]),
        ("10^6", ["1000000", "1,000,000", r"10^{6}"], ["10^7", "60"]),
        ("123456789012345678901234567890", ["123456789012345678901234567890"], ["123456789012345678901234567891"]),
    ],
    "signs": [
        ("-3", ["- 3", "\N{MINUS SIGN}3", "\N{EN DASH}3", "-3.0"], ["3", "+3", "--3"]),
        ("-2^2", ["-4"], ["4"]),
        ("(-2)^3", ["-8", "-2^3"], ["8", "-6"]),
        ("-0.0", ["0", "-0"], ["1"]),
    ],
    "thousands separators": [
        ("1000", ["1,000", "1{,}000", r"1\,000", r"1,\!000", "1 000", "1e3"], ["1,0000", "1.000", "1"]),
        ("100", [], ["1,00"]),
        ("1234567", ["1,234,567", "1 234 567", r"1\,234\,567"], ["1,234,568", "1,234"]),
        ("1,000/3", ["1000/3", r"\frac{1,000}{3}"], ["1/3", "1,000"]),
        ("5000.5", ["5,000.50"], ["50,000.5"]),
        ("12", [], ["1,2"]),
        ("1,2", ["2,1"], ["12", "1.2"]),
        ("1200", [], [r"(1,\ 200)"]),
        ("0", [], [r"1\,000"]),
    ],
    "fractions": [
        ("1/2", ["0.5", ".5", r"\frac{1}{2}", r"\dfrac12", r"\frac 1 2", r"\tfrac{2}{4}", "1:2"], ["2/1", "1.2"]),
        (r"\frac{1}{23}", [r"\frac1{23}", "1/23"], [r"\frac{12}{3}", "123", "12/3"]),
        (r"\frac{12}{3}", ["4"], [r"\frac{1}{23}", r"\frac{3}{12}"]),
        (r"-\frac{3}{4}", [r"\frac{-3}{4}", r"\frac{3}{-4}", "-0.75"], [r"\frac{3}{4}", r"-\frac{4}{3}"]),
        (r"\frac{a}{b}", ["a/b"], [r"\frac{b}{a}"]),
    ],
    "decimals": [
        ("0.5", ["1/2", "0.50", "00.5"], ["5", "0.05", "0,5"]),
        ("1/3", ["0.333333", "0.3333333333"], ["0.33", "0.333", "0.333334"]),
        ("72", [], ["72.0000001"]),
        (r"0.\overline{3}", ["1/3"], ["0.3", "0.33"]),
        (r"0.1\overline{6}", ["1/6"], ["0.16", "1/16"]),
        (r"3.\overline{27}", [r"\frac{36}{11}"], ["3.27"]),
        ("1.5", ["3/2", "1.50"], ["1,5", "15", "1.05"]),
    ],
    "mixed numbers": [
        ("3 1/2", ["3.5", "7/2", r"3\frac{1}{2}"], ["2", "31/2", "3/2", "6"]),
        (r"-1\frac{3}{4}", ["-1.75", "-1 3/4"], ["-0.25", r"1\frac{3}{4}", r"-1\frac{4}{3}"]),
        ("3", [], ["1 2"]),
    ],
    "scientific notation": [
        ("1e-05", ["0.00001", "10^{-5}", r"1 \times 10^{-5}"], ["10^5", "1e-06"]),
        ("1e+20", ["10^{20}", "1" + 20 * "0"], ["10^{21}", "1e-20"]),
        (r"1.1 \times 10^2", ["110", "1.1e2", r"1.1 \cdot 10^{2}"], ["1100", r"1.1 \times 10^3"]),
        (r"2 \times 10^5", ["2 \N{MULTIPLICATION SIGN} 10^5", "200,000"], [r"2 \times 10^{-5}", "2 + 10^5"]),
        ("10^{-3}", ["0.001", "1/1000"], ["10^3", "-1000", "-30"]),
        (r"6.02 \times 10^{23}", ["6.02e23", "602000000000000000000000"], [r"6.02 \times 10^{-23}", "6.02"]),
    ],
    "percentages": [
        ("50%", ["0.5", r"50\%", "50 percent", r"\frac{1}{2}"], ["5%", "0.05", "500"]),
        (r"12\%", ["0.12", r"12 \%"], ["1.2", r"-12\%", "12.5%"]),
        ("12.5", [r"12.5\%", "12.5%"], ["1.25%", "0.125", r"125\%"]),
        (r"12.5\%", ["12.5", "0.125", r"\frac{1}{8}"], ["1.25", "125"]),
        ("0.1", [r"10\%"], ["10", "100%"]),
        (r"33.3\%", ["0.333"], [r"33\%", "1/3"]),
    ],
    "units": [
        (r"45 \text{ cm}", ["45", "45 cm", r"45 \mathrm{cm}", r"45 \text{ cm}^2"], ["54", r"4.5 \text{ cm}"]),
        ("12 eggs", ["12", r"12 \text{ eggs}", "12 eggs"], ["13 eggs", "12 and more", "12 dozen"]),
        ("100 square meters", ["100"], ["10", "100 hundred"]),
        ("5.5", ["5.5 hours", "5.5 kg"], ["5 hours", "55"]),
        ("5", ["5 children"], ["5 million", "5 thousand", "5 January", "5 halves"]),
        ("5", [r"5\text{ meters squared}", r"5\text{ times}"], [r"5\text{ million}", r"5\,\text{dozen}"]),
        ("5", [r"5\text{ more}"], [r"5\text{ and a half}", r"5\text{ squared}", r"5\text{ tenths of a mile}"]),
        ("5000000", ["5 million", r"\$5 \text{ million}", r"5\,\text{million dollars}"], ["5", "5 thousand"]),
        ("4", ["4th", "4 sq m", "4 cm", r"4\text{ m}", r"4\,\mathrm{h}"], ["5th", "14th"]),
        ("2", ["2nd"], ["3rd"]),
        (r"2\text{ cm}, 3\text{ cm}", [r"3\text{ cm}, 2\text{ cm}"], ["2", r"2\text{ cm}, 4\text{ cm}"]),
        (r"2\text{ m} + x\text{ m}", [r"x\text{ m} + 2\text{ m}"], ["2", r"2\text{ m}"]),
        ("2, 3", [r"2 \text{ or } 3 \text{ cm}"], [r"2\text{ cm}, 4\text{ cm}"]),
    ],
    "fonts and sizes": [
        ("72", [r"\boldsymbol{72}", r"\bm{72}", r"\textsf{72}", r"\underline{72}", r"\boldsymbol 72"], [r"\bm{7}2"]),
        ("72", [r"\textcolor{red}{72}", r"{\bf 72}", r"\large 72", r"\bm{\underline{72}}"], [r"\bm{73}"]),
        (r"\frac{1}{2}", [r"\mathbf{\frac{1}{2}}", r"$\boldsymbol{\frac{1}{2}}$"], [r"\mathbf{\frac{1}{3}}"]),
        ("x+1", [r"\boldsymbol{x}+1", r"\boldsymbol{x+1}"], [r"\boldsymbol{x}"]),
        ("12", [r"12 \textup{ cm}", r"\textbf{12 eggs}"], [r"12^2 \textup{ cm}"]),
        ("Monday", [r"\boldsymbol{Monday}", r"\emph{Monday}"], [r"\emph{Sunday}"]),
    ],
    "symbols": [
        ("3/4", ["\u00be", "+\u00be", "3\u20444", "6\u22158"], ["\u00bd", "-\u00be"]),
        ("3.5", ["3\u00bd", "3 \u00bd", "3 1\u20442"], ["\u00bd", "3\u2153"]),
        ("-1/3", ["-\u2153", "\u2212\u2153"], ["\u2153"]),
        ("x^4", ["x\u2074"], ["x\u00b3", "4x"]),
        ("x^{10}", ["x\u00b9\u2070"], ["x^1\u2070", "x^0"]),
        ("2^{-n}", ["2\u207b\u207f"], ["2\u207f"]),
    ],
    "currency": [
        ("18", ["$18", r"\$18", "18 dollars", "€18", "£ 18"], ["$180", r"\$1.8", "$17"]),
        (r"\$1,250.50", ["1250.5", "$1,250.50"], ["1,250", "125050"]),
        (r"\$0.75", ["0.75"], ["75", "7.5"]),
    ],
    "angles": [
        (r"90^\circ", ["90", "90°", r"90^{\circ}", "90 degrees", r"90 \text{ degrees}"], [r"\frac{\pi}{2}", "9°"]),
        (r"\sin 30^\circ", ["0.5", r"\frac{1}{2}", r"\cos 60^\circ", "\\sin(30°)"], [r"\cos 30^\circ", r"\sin 30"]),
        (r"\frac{\sqrt{3}}{2}", [r"\cos 30^{\circ}", r"\cos{\left(30^{\circ}\right)}"], [r"\cos 30", r"\cos 60^\circ"]),
        (r"\sin^2 30^\circ", [r"\frac{1}{4}", r"\sin^{2}(30^\circ)"], [r"\sin 30^\circ"]),
        (r"\cos x", [r"\sin(90^\circ - x)"], [r"\sin(x - 90^\circ)"]),
        (r"\tan 22.5^\circ", [r"\sqrt{2}-1", r"\tan\frac{\pi}{8}"], [r"\tan 22.5"]),
        (r"2\sin 10^\circ \cos 10^\circ", [r"\sin 20^\circ"], [r"\sin 10^\circ"]),
        (r"\frac{\pi}{3}", [r"\pi/3", "π/3", "1.047198"], [r"\frac{3}{\pi}", r"60^\circ", "1.05"]),
    ],
    "roots": [
        (r"2\sqrt{2}", [r"\sqrt{8}", r"2\sqrt2", "2√2", "2.828427"], ["2.83", r"\sqrt{2}", r"2\sqrt{3}", r"\sqrt{4}"]),
        (r"\frac{1}{\sqrt{2}}", [r"\frac{\sqrt{2}}{2}", r"2^{-1/2}"], [r"\frac{\sqrt{2}}{4}", r"\sqrt{2}"]),
        (r"\sqrt{3+2\sqrt{2}}", [r"1+\sqrt{2}"], [r"1-\sqrt{2}", r"\sqrt{3}+\sqrt{2}"]),
        (r"\sqrt[3]{54}", [r"3\sqrt[3]{2}"], [r"3\sqrt{2}", r"2\sqrt[3]{3}"]),
        (r"1+\sqrt{5}", [r"\sqrt{5}+1"], [r"\sqrt{6}", r"1-\sqrt{5}", r"1+\sqrt{5}i"]),
    ],
    "constants and functions": [
        (r"\pi", ["π", "3.141593"], ["3.14", r"\frac{22}{7}", r"2\pi", r"\pi^2"]),
        (r"\frac{3\pi}{4}", [r"\frac{3}{4}\pi", r"3\pi/4"], [r"\frac{4\pi}{3}", r"\frac{3\pi}{4}+1"]),
        ("e^2", ["e^{2}", "7.389056"], ["e^{3}", "7.39", "2e"]),
        (r"\log_2 8", ["3", r"\frac{\ln 8}{\ln 2}"], [r"\log_3 8", r"\log 8", "4"]),
        (r"\sin\frac{\pi}{6}", [r"\frac{1}{2}", "0.5"], [r"\cos\frac{\pi}{6}", r"\frac{\sqrt{3}}{2}"]),
        (r"\infty", ["∞", "infinity", r"+\infty"], [r"-\infty", "0"]),
        (r"\binom{6}{3}", ["20", r"\frac{6!}{3!3!}"], ["18", r"\binom{6}{2}"]),
        ("3!", ["6"], ["3", "4!"]),
        ("3+4i", ["4i+3"], ["3-4i", "7i", "5"]),
        ("i", [], ["-i", "1"]),
        ("2+3i", [r"2+3\mathrm{i}", r"2 + 3 \text{i}", r"3\mathrm{i}+2"], [r"2-3\mathrm{i}", "5", "2+3"]),
        (r"\pi\mathrm{i}", [r"\pi i"], [r"\pi"]),
        (r"\cos t", [r"\cos(t)"], [r"\sin t", r"\cos"]),
    ],
    "polynomials and formulas": [
        ("x^2+1", ["1+x^2", "x^{2}+1"], ["x^2+2", "x^2-1", "2x+1", "x^3+1"]),
        ("(x-2)(x-3)", ["x^2-5x+6", "(x-3)(x-2)"], ["x^2+5x+6", "(x-1)(x-6)"]),
        ("(a+b)^2", ["a^2+2ab+b^2"], ["a^2+b^2"]),
        (r"\frac{n(n+1)}{2}", [r"\frac{n^2+n}{2}", "n(n+1)/2"], [r"\frac{n(n-1)}{2}", "n(n+1)"]),
        (r"\frac{1}{x+1}", [r"\frac{1}{1+x}"], ["1/x+1", r"\frac{1}{x-1}"]),
        ("2^{n+1}", [r"2 \cdot 2^n"], ["2^n+1", "n^2", "2^{n-1}"]),
        ("3x^2y", ["3yx^2"], ["3xy^2", "3x^2"]),
        ("3t", [r"3 \cdot t", "t*3"], ["3", "t"]),
        ("3", [], ["3t", "3s", "3 h"]),
        (r"\pi r^2 h", [r"\pi h r^2", r"The volume is $\pi r^2 h$"], [r"\pi r^2", r"\pi r^2 s"]),
        (r"\pi r^2", [], [r"\pi r^2 h", r"The volume is $\pi r^2 h$"]),
        ("a+b+c", ["c+b+a", "a + b + c"], ["a+b", "abc"]),
        ("2ab", ["2ba"], ["2", "2bc"]),
    ],
    "derivatives": [
        (r"\frac{dy}{dx}=ky", ["dy/dx=yk", r"\frac{\mathrm{d}y}{\mathrm{d}x}-ky=0"], [r"\frac{dy}{dx}=kx", "0=0"]),
        (r"\frac{\partial f}{\partial x}", [r"\frac{\partial f}{\partial x}"], [r"\frac{\partial f}{\partial y}", "0"]),
        ("2x", [r"\frac{dy}{dx}=2x", r"\frac{d}{dx}(x^2)"], [r"\frac{dy}{dx}=2"]),
    ],
    "primes": [
        ("f'(x)=2x", [r"f^{\prime}(x)=2x", "2x", "f\u2019(x)=2x"], ["f(x)=2x", "f''(x)=2x"]),
        ("y''+y=0", ["y+y''=0", r"y^{\prime\prime}+y=0"], ["y'+y=0", "y+y=0"]),
        (r"\frac{u'v-uv'}{v^2}", [r"\frac{vu'-v'u}{v^2}"], ["0"]),
        ("A'", ["A\u2032"], ["A", "A''"]),
        (r"\theta'", [r"\theta^\prime"], [r"\theta"]),
        ("Rolle's theorem", [r"\text{Rolle's theorem}"], ["Rolle"]),
    ],
    "capital letters": [
        ("R-r", ["-r+R", "$R-r$"], ["0", "r-R", "r-r"]),
        (r"\pi(R^2-r^2)", [r"\pi R^2-\pi r^2", r"\pi (R-r)(R+r)"], ["0", r"\pi(r^2-R^2)"]),
        (r"\frac{Mm}{M+m}", [r"\frac{mM}{m+M}"], [r"\frac{m}{2}", r"\frac{M}{2}"]),
        (r"\frac{v}{V}", [r"\frac{v}{V}"], ["1", r"\frac{V}{v}"]),
        (r"\Delta-\delta", [r"-\delta+\Delta"], ["0"]),
        ("R=2, r=1", ["r=1, R=2", "$R=2$ and $r=1$"], ["r=2, R=1"]),
        ("nRT", ["nrt"], ["nR"]),
    ],
    "equations": [
        ("x=2", ["2", "x = 2", "x=2.0"], ["x=3", "y=2", "x=-2", "3"]),
        ("2", ["x=2", "y = 2"], ["x=3"]),
        ("y=2x+1", ["2x+1=y", "y = 1+2x", "2x+1", "y-2x=1"], ["y=2x-1", "x=2y+1", "y=-2x+1"]),
        ("x^2+y^2=25", ["y^2+x^2=25", "x^2+y^2=5^2"], ["x^2+y^2=5", "x^2-y^2=25"]),
        ("f(x)=2x", ["2x"], ["f(x)=x^2", "3x"]),
        ("f(1)=2", ["2=f(1)"], ["f(1)=3", "f(2)=2", "1=1"]),
        ("f(2)=2f(1)", ["2f(1)=f(2)"], ["f(2)=3f(1)"]),
        ("x=1, y=2", ["y=2, x=1"], ["x=2, y=1", "x=1"]),
        ("$$x=1$$ $$y=2$$", ["x=1, y=2", "x=1 y=2", r"\(x=1\), \(y=2\)"], ["y=2", "x=1", "x=1, y=3"]),
        (r"\[x+y=1\]\[x-y=2\]", ["x+y=1, x-y=2", "$x+y=1$ and $x-y=2$"], ["x-y=2", "x+y=1, x-y=3"]),
    ],
    "inequalities": [
        (r"x\ge 3", [r"x \geq 3", "x ≥ 3", r"3 \le x", r"[3,\infty)"], ["x>3", r"x\le 3", r"(3,\infty)"]),
        (r"(-\infty,3]", [r"x \le 3"], ["x<3", r"x \ge 3"]),
        ("1 < x < 2", ["(1,2)", "1<x<2"], ["1 < x < 3", r"1 \le x < 2", "[1,2]"]),
    ],
    "tuples and intervals": [
        ("(1,2)", [r"\left( 1, 2 \right)", "(1.0, 2)", r"(\frac{2}{2},2)"], ["(2,1)", "[1,2]", "[1,2)", "(1,2,3)"]),
        ("[1,2)", [r"\left[1, 2\right)"], ["(1,2]", "[1,2]", "(1,2)", "[1,3)"]),
        ("(1,2,3)", [r"(1,\ 2,\ 3)"], ["(1,3,2)", "(1,2)", "(1,2,3,4)"]),
        (r"(-\infty,2)\cup(3,\infty)", [r"(3,\infty) \cup (-\infty,2)"], [r"(-\infty,2)\cup[3,\infty)"]),
        ("(1, 200)", [r"(1,\ 200)"], ["1200", "(1, 20)"]),
    ],
    "sets and lists": [
        (r"\{1,2\}", [r"\{2,1\}", "1,2", "1 and 2", r"\{1, 2\}"], [r"\{1,2,3\}", r"\{1,3\}", "12", r"\{1\}"]),
        ("1,2,3", ["3, 2, 1", "1;2;3"], ["1,2,4", "1,2", "123"]),
        (r"\pm 2", ["2,-2", r"\{-2,2\}"], ["2", "-2", r"\pm 3"]),
        ("x=2 or x=3", ["2,3", r"x=3\text{ or }x=2"], ["2", "x=2,x=4"]),
        (r"\emptyset", [r"\varnothing", r"\{\}"], [r"\{0\}", "0"]),
        (r"\mathbb{R}", [r"(-\infty,\infty)"], [r"\mathbb{Z}", r"(0,\infty)"]),
    ],
    "matrices": [
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            [r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2.0 \end{pmatrix}"],
            [r"\begin{pmatrix}2\\1\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"],
        ),
        (
            r"\begin{pmatrix}1/2&0\\0&2\end{pmatrix}",
            [r"\begin{pmatrix} 0.5 & 0 \\ 0 & 2 \end{pmatrix}", r"\begin{bmatrix}\frac12&0\\0&2\end{bmatrix}"],
            [r"\begin{pmatrix}2&0\\0&1/2\end{pmatrix}", r"\begin{vmatrix}1/2&0\\0&2\end{vmatrix}"],
        ),
    ],
    "words": [
        ("Monday", ["monday", r"\text{Monday}", "**Monday**", "Monday."], ["Tuesday", "Mon", "Sunday"]),
        (r"\text{no solution}", ["no solution", "No solution"], ["no", "infinitely many solutions"]),
        ("A", ["(A)", r"\text{A}", r"\textbf{(A)}"], ["B", "(B)", "AB"]),
        ("B", ["B)", "B.", "B:", "**B)**", r"\text{B)}", r"\boldsymbol{B}"], ["A)", "C.", "8)"]),
        ("yes", ["Yes", r"\text{yes}"], ["no", "sey"]),
        ("no", ["No"], ["on"]),
        ("AB", ["AB"], ["BA"]),
        ("listen", [], ["silent"]),
        ("even", [], ["odd", "2"]),
    ],
    "times and dates": [
        ("3:00", ["3:00 pm", r"3:00 \text{ p.m.}"], ["4:00", "3:30"]),
        ("12:45", ["12:45 pm"], ["12:54", "1:45"]),
        ("2024-01-05", [], ["2018", "2024-05-01"]),
    ],
}  # fmt: skip
RIGHT = [
    (kind, truth, answer) for kind, rows in TABLE.items() for truth, right, _ in rows for answer in [truth, *right]
]
WRONG = [(kind, truth, answer) for kind, rows in TABLE.items() for truth, _, wrong in rows for answer in wrong]

# Where the verdict is not the one that a person would give. What stands here is math-verify's, or needs knowledge.
KNOWN = [
    ("50%", "50", "ok"),  # a percentage equals its number too
    (r"\{1,2\}", "(2,1)", "ok"),  # where the ground truth is a set, order does not count
    ("(1,2)", r"\{1,2\}", "ok"),  # a pair in the right order is a set
    ("5 \\text{ m}", "5 \\text{ km}", "ok"),  # units are not compared
    ("50 cents", "50", "ok"),
    ("1 \\text{ hour } 30 \\text{ minutes}", "90", "invalid"),  # two values are not read, but as the same text
    ("7 \\text{ feet } 3 \\text{ inches}", "7 \\text{ feet } 4 \\text{ inches}", "invalid"),
    ("7", "7 \\text{ feet } 4 \\text{ inches}", "wrong"),
    ("45 m/s", "45", "wrong"),
    ("2km", "2", "ok"),  # two letters at the end may be a unit
    ("5 m", "5", "wrong"),  # one letter is a variable; \text{ m} is a unit
    ("2(3)", "6", "wrong"),  # a mixed number, 5
    ("101_2", "101_3", "ok"),  # the base is passed over
    ("6:30", "2:10", "ok"),  # a time with minutes is a ratio
    ("3:00 pm", "3:00 am", "ok"),
    ("0.0000001", "0.0000002", "ok"),  # both are 0 to six places
    ("0.1+0.2", r"\frac{3}{10}", "wrong"),  # binary numbers
    (r"\sqrt{-1}", "i", "wrong"),  # i is a letter
    (r"x<2 \text{ or } x>3", r"(-\infty,2)\cup(3,\infty)", "wrong"),  # a set of two inequalities
    ("1 < x < 2", "2 > x > 1", "wrong"),
    ("0.333...", "1/3", "invalid"),
    ("12", "twelve", "wrong"),
    ("5", "The answer is 5", "wrong"),  # the answer is what is in the box, all of it
]


def test_the_table_has_more_than_four_hundred_pairs() -> None:
    assert len(RIGHT) + len(WRONG) > 400


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("verdict", "kind", "ground_truth", "answer"), [("ok", *row) for row in RIGHT] + [("wrong", *row) for row in WRONG]
)
def test_an_answer_has_the_verdict_of_its_list(verdict: str, kind: str, ground_truth: str, answer: str) -> None:
    assert check_answer(answer, ground_truth).verdict == verdict


@pytest.mark.parametrize(("ground_truth", "answer", "verdict"), KNOWN)
def test_a_verdict_that_is_known_to_be_debatable_is_as_listed(ground_truth: str, answer: str, verdict: str) -> None:
    assert check_answer(answer, ground_truth).verdict == verdict


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    ("ground_truth", "answer"),
    [
        (truth, answer)
        for _, truth, answer in RIGHT + WRONG
        if read_plain_number(truth) and read_plain_number(clean(answer))
    ],
)
def test_plain_numbers_of_the_table_get_the_decision_that_math_verify_gives(ground_truth: str, answer: str) -> None:
    for one, other in ((answer, ground_truth), (ground_truth, answer)):
        assert check_answer(one, other) == compare_by_math_verify(one, other)
