r"""Decide whether an answer states a number, or a computation that math-verify would evaluate.

Without this check a response that restates its task is rewarded: `27 + 45` equals 72, and `\sum_{k=1}^{100} k` equals
5050. A number is an integer, a decimal, a fraction of these (such as `144/2`), a mixed number, a ratio (`1:2`) or a
power of ten with a factor; with a sign, a currency, a percent sign, a unit. Names may precede it (`x = 5`,
`AB = CD = 5`, `f(2) = 5`). Whether the number is correct is not decided here.
"""

import re

from rewards.math.extraction import formulas
from rewards.math.units import without_unit

_EQUALS = re.compile(r"=|\\approx(?![A-Za-z])")
_SPACE = re.compile(r"(?:\\[,;:! ]|\\(?:left|right|displaystyle|quad)(?![A-Za-z])|~|\s)+")
_TWO_NUMBERS = re.compile(r"(?<!frac )(?<!frac)[\d.}] [\d.]")  # math-verify multiplies them
_FONT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mathsf|mbox|operatorname)"
_WRAPPED = re.compile(rf"(?:{_FONT})?\{{([^{{}}]*)\}}|\(([^()]*)\)|\\\{{([^{{}}]*)\\\}}")
_OPERATION = re.compile(r"\\(?:[dtc]?frac|sqrt|cdot|times|div|max|min|gcd|lcm)(?![A-Za-z])")

_DECIMAL = r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?|\.\d+)"
_SIGN = r"(?:[+-]?(?:\\?\$|[€£¥₹])?|(?:\\?\$|[€£¥₹])[+-])"
_PART = rf"(?:\{{[+-]?{_DECIMAL}\}}|\d)"
_POWER_OF_TEN = r"10\^(?:\{[+-]?\d+\}|\d)"
_NUMBER = re.compile(
    rf"""
    {_SIGN}
    (?: {_DECIMAL}[/:]-?{_DECIMAL}
      | {_DECIMAL}(?:\\times|\\cdot|\*){_POWER_OF_TEN}
      | {_POWER_OF_TEN}
      | {_DECIMAL}?\\[dtc]?frac{_PART}{_PART}
      | {_DECIMAL}
    )
    (?: (?P<letter>[A-Za-z])(?:\^(?:-?\d|\{{-?\d\}}))?
      | {_FONT}\{{(?:[^{{}}0-9=+*!]|(?<=[A-Za-z])\^(?:-?\d|\{{-?\d\}}))*\}}(?:\^(?:-?\d|\{{-?\d\}}))?
      | (?:\\circ|\^\{{?\\circ\}}?|\\degree|\\?%|[./°])
    )*
    """,
    re.VERBOSE,
)
_POWER = re.compile(rf"{_SIGN}\d+\^(?:\{{\d+\}}|\d)")
_LONG_NUMBER = 20  # characters
_NAME = re.compile(r"\s*\\?[A-Za-z]+\s*")


def states_number(latex: str) -> bool:
    r"""Return True if `latex` is a number; not a sum, a root, a function or a list of numbers.

    Args:
        latex: rewritten by `answer_latex.to_latex`, so that `1e5`, `3 1/2` and `1\,000` are numbers here.
    """
    value = _value(latex)
    return value is not None and _NUMBER.fullmatch(value) is not None


def is_number(latex: str) -> bool:
    """Return True if a ground truth is a number without variables; a name may precede it, as in `x = 5`."""
    sides = _sides(latex)
    if sides is None or not all(_NAME.fullmatch(name) for name in sides[:-1]):
        return False
    value = _value(without_unit(latex))
    match = None if value is None else _NUMBER.fullmatch(value)
    return match is not None and match["letter"] is None


def states_power(latex: str, number: str) -> bool:
    r"""Return True if `latex` is a power of integers, such as `7^{99}`, and `number` is too long to be written."""
    value = _value(latex) if len(number) > _LONG_NUMBER else None
    return value is not None and _POWER.fullmatch(value) is not None


def _value(latex: str) -> str | None:
    """Return the text of the value without spaces; None if there are several, or if it follows a computation."""
    sides = _sides(latex)
    if sides is None:
        return None
    *names, value = sides
    if not all(re.search("[A-Za-z]", _OPERATION.sub("", name)) for name in names):
        return None  # 27 + 45 = 72 restates the task, and 1 = 2 = 72 would be 72
    value = _SPACE.sub(" ", value).strip()
    if _TWO_NUMBERS.search(value):
        return None
    value = value.replace(" ", "")
    while wrapped := _WRAPPED.fullmatch(value):
        value = next(filter(None, wrapped.groups()), "")
    return value


def _sides(latex: str) -> list[str] | None:
    """Return the sides of the equation in `latex`; None if it has several formulas."""
    found = formulas(latex)
    return _EQUALS.split(found[0]) if len(found) == 1 else None
