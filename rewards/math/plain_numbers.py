r"""Compare plain numbers exactly, with the verdict that math-verify would give.

A plain number is an integer, a decimal or a fraction of integers (`3/4`, `\frac{3}{4}`), with a sign, a currency `$` or
thousands separators. Reading and comparing two takes some microseconds. Equality is defined as in math-verify:

- integers and fractions are equal when their values are;
- a decimal equals a fraction or a decimal when both round to the same sixth place, half to even (0.333333 is 1/3);
- a decimal equals an integer only when their values are the same (72.0000001 is not 72).

math-verify holds decimals as binary floats, and rounds to a number of digits that depends on the size. Therefore a pair
is decided here only if this cannot matter; others (over 15 digits, close but very small or large) are left to it.
"""

import re
from typing import NamedTuple

_MAX_DIGITS = 100  # of an integer; sympy itself refuses more than 4,300
_MAX_BINARY_DIGITS = 15  # digits of a decimal or fraction that a binary float preserves
_SIXTH_PLACE = 10**6
_BINARY_MARGIN = 10**12  # numbers that differ by less than 1 / margin of their size may be the same binary float
_TIE_MARGIN = 10**6  # a fraction closer to a tie than 1 / margin of a sixth place may be rounded to either side
_SMALLEST, _LARGEST = 10**3, 10**8  # close decimals are compared where |x| is from 1 / _SMALLEST to _LARGEST

_NUMBER = re.compile(
    r"""
    (?:\\?\$)? (?P<sign>[+-]?) \ ? (?:\\?\$)?
    (?:
        (?P<whole>[1-9][0-9]{0,2}(?:,[0-9]{3})+ | [0-9]+) (?P<decimals>\.[0-9]+)?
      | (?P<bare_decimals>\.[0-9]+)
      | (?P<numerator>[0-9]+) \ ? / \ ? (?P<denominator>[0-9]+)
      | \\[dtc]?frac \{(?P<upper>[+-]?[0-9]+)\}\{(?P<lower>[0-9]+)\}
      | \\[dtc]?frac (?P<upper_digit>[0-9])(?P<lower_digit>[0-9])
    )
    """,
    re.VERBOSE,
)


class PlainNumber(NamedTuple):
    """Represent numerator / denominator, and whether math-verify holds it exactly."""

    numerator: int
    denominator: int  # positive; the fraction need not be in lowest terms
    is_decimal: bool  # a binary float in math-verify; otherwise exact


def read_plain_number(text: str) -> PlainNumber | None:
    """Read a text, without surrounding space, as a plain number.

    Returns: None for other texts, an undefined number (1/0) and a number with too many digits.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign = -1 if match["sign"] == "-" else 1
    if (whole := match["whole"]) is not None:
        return _decimal(sign, whole.replace(",", ""), match["decimals"] or "", is_signed=bool(match["sign"]))
    if (decimals := match["bare_decimals"]) is not None:
        return _decimal(sign, "0", decimals, is_signed=bool(match["sign"]))
    upper = match["numerator"] or match["upper"] or match["upper_digit"]
    lower = match["denominator"] or match["lower"] or match["lower_digit"]
    if len(upper) > _MAX_BINARY_DIGITS or len(lower) > _MAX_BINARY_DIGITS or int(lower) == 0:
        return None
    return PlainNumber(sign * int(upper), int(lower), is_decimal=False)


def are_equal(first: PlainNumber, second: PlainNumber) -> bool | None:
    """Return whether math-verify considers the two equal; None if only math-verify can decide. Symmetric."""
    cross, other_cross = first.numerator * second.denominator, second.numerator * first.denominator
    difference = abs(cross - other_cross)
    if difference == 0:
        return True
    if not (first.is_decimal or second.is_decimal):
        return False
    if difference * _BINARY_MARGIN < abs(cross):
        return None
    if difference * _SIXTH_PLACE >= 2 * first.denominator * second.denominator or _is_integer(first, second):
        return False
    rounded, other_rounded = _sixth_places(first), _sixth_places(second)
    if rounded is None or other_rounded is None:
        return None
    return rounded == other_rounded


def _decimal(sign: int, whole: str, decimals: str, *, is_signed: bool) -> PlainNumber | None:
    """Read a decimal, whose `decimals` include the point, or an integer, whose `decimals` are empty."""
    if not decimals:
        return PlainNumber(sign * int(whole), 1, is_decimal=False) if len(whole) <= _MAX_DIGITS else None
    if len(whole) + len(decimals) - 1 > _MAX_BINARY_DIGITS:
        return None
    # math-verify rewrites the text 0.5, and no other decimal, as 1/2.
    is_half = whole == "0" and decimals == ".5" and not is_signed
    numerator = sign * int(whole + decimals[1:])
    return PlainNumber(numerator, 10 ** (len(decimals) - 1), is_decimal=not is_half)


def _is_integer(*numbers: PlainNumber) -> bool:
    """Return True if any of them is an exact integer in math-verify, 6/3 included."""
    return any(not number.is_decimal and number.numerator % number.denominator == 0 for number in numbers)


def _sixth_places(number: PlainNumber) -> int | None:
    """Return the number in millionths, rounded half to even; None if math-verify may round differently."""
    size = abs(number.numerator)
    if size * _SMALLEST < number.denominator or size > _LARGEST * number.denominator:
        return None
    millionths, rest = divmod(size * _SIXTH_PLACE, number.denominator)
    to_tie = 2 * rest - number.denominator
    if not number.is_decimal and abs(to_tie) * _TIE_MARGIN < number.denominator:
        return None
    millionths += to_tie > 0 or (to_tie == 0 and millionths % 2 == 1)
    if str(millionths).strip("0") == "1":  # a power of ten, which math-verify keeps with one digit less if rounded up
        return None
    return millionths if number.numerator > 0 else -millionths
