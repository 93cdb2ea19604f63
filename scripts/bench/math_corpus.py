r"""Generate pairs of answer and ground truth for the benchmark of the math rewards, from a seed.

Four of five are plain numbers, as in GSM8K or DAPO-Math; the rest is LaTeX of the kinds that occur in MATH. Half of the
answers equal the ground truth's text, as most correct answers of a model do; a fifth are correct in another notation;
the others are similar but wrong. All pairs are different.
"""

import random
from collections.abc import Callable
from math import comb
from typing import NamedTuple

SHARE_PLAIN, SHARE_SAME_TEXT, SHARE_OTHER_NOTATION = 0.8, 0.5, 0.2
WORDS = (
    "Monday",
    "Tuesday",
    "east",
    "west",
    "odd number",
    "parabola",
    "ellipse",
    "circle",
    "Alice",
    "Robert",
    "always",
)


class Pair(NamedTuple):
    """Hold an answer as a model writes it into its box, and the ground truth."""

    kind: str
    answer: str
    ground_truth: str


# Of each kind: a ground truth, the same value in another notation, a similar but wrong answer.
Variants = tuple[str, str, str]


def _integers(r: random.Random) -> Variants:
    value = r.choice((r.randint(0, 99), r.randint(0, 9999), r.randint(-999, 10**9)))
    return (
        str(value),
        r.choice((f"{value:,}", f"{value}.0", f"{value}.", f"${value}$")),
        str(value + r.choice((-1, 1, 10))),
    )


def _separated(r: random.Random) -> Variants:
    value = r.randint(1000, 10**7)
    return f"{value:,}", str(value), f"{value + 1000:,}"


def _decimals(r: random.Random) -> Variants:
    places = r.randint(1, 4)
    value = r.randint(1, 10**5)
    text = f"{value / 10**places:.{places}f}"
    return text, rf"\frac{{{value}}}{{{10**places}}}", f"{(value + 1) / 10**places:.{places}f}"


def _fractions(r: random.Random) -> Variants:
    upper, lower = r.randint(1, 99), r.randint(2, 99)
    sign = r.choice(("", "-"))
    return rf"{sign}\frac{{{upper}}}{{{lower}}}", f"{sign}{upper}/{lower}", rf"{sign}\frac{{{lower}}}{{{upper}}}"


def _slashed(r: random.Random) -> Variants:
    upper, lower = r.randint(1, 99), r.randint(2, 99)
    return f"{upper}/{lower}", rf"\dfrac{{{upper}}}{{{lower}}}", f"{upper}/{lower + 1}"


def _surd(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.choice((2, 3, 5, 6, 7, 10))
    return rf"{a}\sqrt{{{b}}}", rf"\sqrt{{{a * a * b}}}", rf"{a}\sqrt{{{b + 1}}}"


def _surd_fraction(r: random.Random) -> Variants:
    a, b, c = r.randint(2, 9), r.choice((2, 3, 5, 7)), r.randint(2, 12)
    return (
        rf"\frac{{{a}\sqrt{{{b}}}}}{{{c}}}",
        rf"\dfrac{{{a}\sqrt {b}}}{{{c}}}",
        rf"\frac{{{a}\sqrt{{{b}}}}}{{{c + 1}}}",
    )


def _surd_sum(r: random.Random) -> Variants:
    a, b, c = r.randint(1, 20), r.randint(2, 9), r.choice((2, 3, 5, 7))
    return rf"{a}+{b}\sqrt{{{c}}}", rf"{b}\sqrt{{{c}}}+{a}", rf"{a}-{b}\sqrt{{{c}}}"


def _multiple_of_pi(r: random.Random) -> Variants:
    a, b = r.randint(2, 40), r.randint(2, 12)
    return rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", rf"\frac{{{a + 1}\pi}}{{{b}}}"


def _power(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.randint(2, 12)
    return f"{a}^{{{b}}}", str(a**b), f"{a}^{{{b + 1}}}"


def _interval(r: random.Random) -> Variants:
    a, b = r.randint(-20, 0), r.randint(1, 20)
    return f"[{a},{b})", rf"\left[{a}, {b}\right)", f"({a},{b}]"


def _union(r: random.Random) -> Variants:
    a, b = r.randint(-20, 0), r.randint(1, 20)
    text = rf"(-\infty,{a})\cup({b},\infty)"
    return text, rf"\left(-\infty, {a}\right) \cup \left({b}, \infty\right)", rf"(-\infty,{a})\cup[{b},\infty)"


def _point(r: random.Random) -> Variants:
    a, b = r.randint(-20, 0), r.randint(1, 20)
    return f"({a},{b})", rf"\left( {a}, {b} \right)", f"({b},{a})"


def _triple(r: random.Random) -> Variants:
    a, b, c = (r.randint(-9, 9) for _ in range(3))
    return f"({a},{b},{c})", rf"\left({a}, {b}, {c}\right)", f"({a},{b},{c + 1})"


def _finite_set(r: random.Random) -> Variants:
    a, b, c = r.sample(range(50), 3)
    return rf"\{{{a},{b},{c}\}}", rf"\{{{c}, {a}, {b}\}}", rf"\{{{a},{b},{c + 50}\}}"


def _several(r: random.Random) -> Variants:
    a, b = r.sample(range(-50, 100), 2)
    return f"{a},{b}", f"{b}, {a}", f"{a},{b + 150}"


def _polynomial(r: random.Random) -> Variants:
    a, b, c = r.randint(2, 9), r.randint(2, 20), r.randint(1, 30)
    return f"{a}x^2+{b}x-{c}", f"-{c}+{b}x+{a}x^2", f"{a}x^2+{b}x+{c}"


def _factors(r: random.Random) -> Variants:
    a, b = r.randint(1, 9), r.randint(10, 20)
    return f"(x-{a})(x+{b})", f"x^2+{b - a}x-{a * b}", f"(x+{a})(x+{b})"


def _equation(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.randint(1, 20)
    return f"y={a}x+{b}", f"y = {b} + {a}x", f"y={a}x-{b}"


def _assignment(r: random.Random) -> Variants:
    value = r.randint(-99, 99)
    return f"x={value}", str(value), f"x={value + 1}"


def _inequality(r: random.Random) -> Variants:
    value = r.randint(-99, 99)
    return rf"x\ge {value}", rf"x \geq {value}", f"x>{value}"


def _matrix(r: random.Random) -> Variants:
    a, b, c, d = r.sample(range(-9, 20), 4)
    rows = rf"{a} & {b} \\ {c} & {d}"
    return (
        rf"\begin{{pmatrix}} {rows} \end{{pmatrix}}",
        rf"\begin{{bmatrix}}{a}&{b}\\{c}&{d}\end{{bmatrix}}",
        rf"\begin{{pmatrix}} {a} & {c} \\ {b} & {d} \end{{pmatrix}}",
    )


def _word(r: random.Random) -> Variants:
    first, second = r.sample(WORDS, 2)
    return rf"\text{{{first}}}", first, rf"\text{{{second}}}"


def _choice(r: random.Random) -> Variants:
    first, second = r.sample("ABCDEFGH", 2)
    return rf"\text{{({first})}}", first, second


def _quantity(r: random.Random) -> Variants:
    value, unit = r.randint(1, 500), r.choice(("cm", "m", "km", "hours", "square meters", "mph", "cm^2"))
    if unit.endswith("^2"):
        return rf"{value} \text{{ cm}}^2", str(value), rf"{value + 1} \text{{ cm}}^2"
    return rf"{value} \text{{ {unit}}}", str(value), rf"{value + 1} \text{{ {unit}}}"


def _angle(r: random.Random) -> Variants:
    value = r.randint(1, 360)
    return rf"{value}^\circ", str(value), rf"{value + 1}^\circ"


def _percentage(r: random.Random) -> Variants:
    value = r.randint(1, 99)
    return rf"{value}\%", f"{value}%", rf"{value + 1}\%"


def _scientific(r: random.Random) -> Variants:
    a, b = r.randint(11, 99), r.randint(2, 9)
    return rf"{a / 10} \times 10^{{{b}}}", str(a * 10 ** (b - 1)), rf"{a / 10} \times 10^{{{b + 1}}}"


def _mixed(r: random.Random) -> Variants:
    a, b, c = r.randint(1, 20), r.randint(1, 6), r.randint(7, 12)
    return rf"{a}\frac{{{b}}}{{{c}}}", rf"\frac{{{a * c + b}}}{{{c}}}", rf"{a + 1}\frac{{{b}}}{{{c}}}"


def _binomial(r: random.Random) -> Variants:
    n, k = r.randint(5, 20), r.randint(2, 4)
    return rf"\binom{{{n}}}{{{k}}}", str(comb(n, k)), rf"\binom{{{n + 1}}}{{{k}}}"


def _complex_number(r: random.Random) -> Variants:
    a, b = r.randint(1, 20), r.randint(2, 20)
    return f"{a}+{b}i", f"{b}i+{a}", f"{a}-{b}i"


def _exponential(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.randint(1, 9)
    return f"{a}^{{n+{b}}}", rf"{a}^n \cdot {a}^{{{b}}}", f"{a}^{{n-{b}}}"


def _rational_function(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.randint(1, 20)
    return rf"\frac{{{a}}}{{x+{b}}}", rf"\dfrac{{{a}}}{{{b}+x}}", rf"\frac{{{a}}}{{x-{b}}}"


def _formula(r: random.Random) -> Variants:
    a = r.randint(2, 9)
    return rf"\frac{{n(n+{a})}}{{2}}", rf"\frac{{n^2+{a}n}}{{2}}", rf"\frac{{n(n-{a})}}{{2}}"


def _logarithm(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.randint(11, 99)
    return rf"\log_{a} {b}", rf"\frac{{\ln {b}}}{{\ln {a}}}", rf"\log_{a} {b + 1}"


def _trigonometric(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.randint(2, 9)
    return rf"{a}\sin {b}x", rf"{a} \sin({b}x)", rf"{a}\cos {b}x"


def _power_of_e(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.randint(2, 20)
    return f"{a}e^{{{b}x}}", f"e^{{{b}x}} \\cdot {a}", f"{a}e^{{-{b}x}}"


def _cube_root(r: random.Random) -> Variants:
    a, b = r.randint(2, 9), r.choice((2, 3, 5, 7))
    return rf"{a}\sqrt[3]{{{b}}}", rf"\sqrt[3]{{{a**3 * b}}}", rf"{a}\sqrt[3]{{{b + 1}}}"


PLAIN = (_integers, _integers, _integers, _integers, _integers, _separated, _decimals, _decimals, _fractions, _slashed)
LATEX = (
    _surd, _surd_fraction, _surd_sum, _cube_root, _multiple_of_pi, _power, _power_of_e, _logarithm, _trigonometric,
    _interval, _union, _point, _triple, _finite_set, _several, _polynomial, _factors, _formula, _rational_function,
    _exponential, _equation, _assignment, _inequality, _matrix, _word, _choice, _quantity, _angle, _percentage,
    _scientific, _mixed, _binomial, _complex_number,
)  # fmt: skip


def make_pairs(count: int, seed: int) -> list[Pair]:
    """Return `count` different pairs in random order, of which the fraction SHARE_PLAIN are plain numbers."""
    r = random.Random(seed)
    num_plain = round(SHARE_PLAIN * count)
    pairs = [*_pairs_of(PLAIN, num_plain, r), *_pairs_of(LATEX, count - num_plain, r)]
    r.shuffle(pairs)
    return pairs


def _pairs_of(kinds: tuple[Callable[[random.Random], Variants], ...], count: int, r: random.Random) -> list[Pair]:
    pairs: dict[Pair, None] = {}
    while len(pairs) < count:
        kind = kinds[len(pairs) % len(kinds)]
        truth, other_notation, wrong = kind(r)
        draw = r.random() - SHARE_SAME_TEXT
        answer = truth if draw < 0 else other_notation if draw < SHARE_OTHER_NOTATION else wrong
        pairs[Pair(kind.__name__.strip("_"), answer, truth)] = None
    return list(pairs)
