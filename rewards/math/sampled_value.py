r"""What expressions are worth, without a computer algebra system: numbers and letters flow in, their values flow out.

A value is held at two points in place of its letters: exactly, as a fraction, while only the four operations and
integer powers made it; else with 50 digits. Two values that differ clearly at a point are different expressions. Two
that agree at both points (random numbers of 60 bits) are the same; whether math-verify finds that out is another
question, which `are_same` answers only where it surely does.
"""

from collections.abc import Callable
from decimal import Context, Decimal, DecimalException
from fractions import Fraction
from math import cos, log, log10, sin, tan
from random import Random
from typing import NamedTuple

from rewards.math.plain_numbers import PlainNumber, are_equal

LETTERS = "abcikmnpqrstuvwxyz"  # e is a constant, d a differential, f, g and h are functions, l and o units
_MAX_EXPONENT, _MAX_EXACT_EXPONENT = 1000, 20
_MAX_EXACT_BITS = 10_000  # of a power
_FUNCTIONS = {r"\sin": sin, r"\cos": cos, r"\tan": tan, r"\ln": log, r"\log": log10}
_CONTEXT = Context(prec=50)
_AGREEMENT = Decimal("1e-40")  # relative: more than rounding leaves between equal values
_DIFFERENCE = Decimal("1e-5")  # relative to the larger value or to 1: more than math-verify rounds away
_RANDOM = Random(5)
_POINTS = {letter: tuple(1 + Fraction(_RANDOM.getrandbits(60), 2**60) for _ in range(2)) for letter in LETTERS}


class UndefinedValueError(ArithmeticError):
    """The value is no real number, or too large to be computed here."""


class Value(NamedTuple):
    """An expression's value at the two points, and what math-verify's way of comparing depends on."""

    at_points: tuple[Fraction | Decimal, ...]  # all of one type
    number: PlainNumber | None = None  # where math-verify has a number, not an expression that is worth one
    is_letter: bool = False
    has_letter: bool = False
    is_inexact: bool = False  # a decimal, which is a binary number to math-verify, or computed from one; a function

    @property
    def is_exact(self) -> bool:
        """Whether only the four operations and integer powers made it."""
        return isinstance(self.at_points[0], Fraction)

    @property
    def is_infinite(self) -> bool:
        """Whether it is INFINITY or MINUS_INFINITY."""
        return isinstance(self.at_points[0], Decimal) and self.at_points[0].is_infinite()

    @property
    def is_integer(self) -> bool:
        """Whether it is an exact integer to math-verify, 6/3 included."""
        number = self.number
        return number is not None and not number.is_decimal and number.numerator % number.denominator == 0


PI = Value((Decimal("3.14159265358979323846264338327950288419716939937510582097494"),) * 2)
E = Value((Decimal("2.71828182845904523536028747135266249775724709369995957496697"),) * 2)
INFINITY = Value((Decimal("Infinity"),) * 2)
MINUS_INFINITY = Value((Decimal("-Infinity"),) * 2)


def from_number(number: PlainNumber) -> Value:
    """The value of a number that is a number to math-verify."""
    exact = Fraction(number.numerator, number.denominator)
    return Value((exact, exact), number=number, is_inexact=number.is_decimal)


def from_integer(number: int) -> Value:
    """The value of an integer."""
    return from_number(PlainNumber(number, 1, is_decimal=False))


def from_letter(letter: str) -> Value:
    """The value of one of LETTERS."""
    return Value(_POINTS[letter], is_letter=True, has_letter=True)


def negate(value: Value) -> Value:
    """-value, a number if it is one."""
    if value.number is not None:
        return from_number(value.number._replace(numerator=-value.number.numerator))
    return multiply(from_integer(-1), value)


def add(first: Value, second: Value) -> Value:
    """first + second; no number, even of numbers: math-verify does not evaluate what it reads."""
    return _combine(first, second, lambda x, y: x + y, _CONTEXT.add)


def multiply(first: Value, second: Value) -> Value:
    """first * second, as `add`."""
    return _combine(first, second, lambda x, y: x * y, _CONTEXT.multiply)


def divide(first: Value, second: Value) -> Value:
    """first / second; of two integers a number, else as `add`.

    Raises: UndefinedValueError when the divisor is zero.
    """
    if any(abs(x) < _AGREEMENT for x in _decimals(second)):
        raise UndefinedValueError
    if first.is_integer and second.is_integer:
        exact = Fraction(first.at_points[0]) / Fraction(second.at_points[0])
        return from_number(PlainNumber(exact.numerator, exact.denominator, is_decimal=False))
    return _combine(first, second, lambda x, y: x / y, _CONTEXT.divide)


def power(base: Value, exponent: Value) -> Value:
    """base ** exponent, as `add`.

    Raises: UndefinedValueError for a large exponent, and where the power is not real or not defined.
    """
    exponents, n = _decimals(exponent), int(exponent.at_points[0])
    if any(abs(x) > _MAX_EXPONENT for x in exponents) or (n <= 0 and any(x == 0 for x in base.at_points)):
        raise UndefinedValueError
    bases = _fractions(base)
    powers: tuple[Fraction | Decimal, ...]
    is_short = all(abs(n) * (x.numerator * x.denominator).bit_length() <= _MAX_EXACT_BITS for x in bases)
    if bases and is_short and exponent.is_integer and abs(n) <= _MAX_EXACT_EXPONENT:
        powers = tuple(Fraction(x**n) for x in bases)
    elif any(x <= 0 for x in _decimals(base)):
        raise UndefinedValueError
    else:
        powers = _rounded(_CONTEXT.power, base, exponent)
    has_letter = base.has_letter or exponent.has_letter
    return Value(powers, has_letter=has_letter, is_inexact=base.is_inexact or exponent.is_inexact)


def square_root(value: Value) -> Value:
    """The root, as `add`.

    Raises: UndefinedValueError where it is not real.
    """
    decimals = _decimals(value)
    if any(x < 0 for x in decimals):
        raise UndefinedValueError
    roots = tuple(_CONTEXT.sqrt(x) for x in decimals)
    return Value(roots, has_letter=value.has_letter, is_inexact=value.is_inexact)


def function(name: str, argument: Value) -> Value:
    """`\\sin`, `\\cos`, `\\tan`, `\\ln` or `\\log` of a value, to 15 digits.

    Raises: UndefinedValueError for a logarithm that is not real.
    """
    try:
        results = tuple(Decimal(_FUNCTIONS[name](float(x))) for x in argument.at_points)
    except (ValueError, OverflowError) as error:
        raise UndefinedValueError from error
    return Value(results, has_letter=argument.has_letter, is_inexact=True)


def are_same(first: Value, second: Value) -> bool | None:
    """Whether math-verify calls the two the same; None where that takes math-verify itself. Symmetric."""
    if first.number is not None and second.number is not None:
        return are_equal(first.number, second.number)
    if first.is_infinite or second.is_infinite:
        return first.at_points == second.at_points
    pairs = zip(_decimals(first), _decimals(second), strict=True)
    gap = max(abs(x - y) / max(Decimal(1), abs(x), abs(y)) for x, y in pairs)
    if gap > _DIFFERENCE:
        return False
    if gap > _AGREEMENT or first.is_inexact or second.is_inexact or first.is_letter or second.is_letter:
        return None
    if _fractions(first) and _fractions(second):
        # Equal fractions of polynomials: simplify() finds their difference to be 0, which it may not with roots.
        return True if first.at_points == second.at_points else None
    are_constants = not first.has_letter and not second.has_letter
    # Two constants are compared by the digits of their difference, but one with a number by simplify().
    return True if are_constants and first.number is None and second.number is None else None


def _combine(
    first: Value,
    second: Value,
    exact: Callable[[Fraction, Fraction], Fraction],
    rounded: Callable[[Decimal, Decimal], Decimal],
) -> Value:
    x, y = _fractions(first), _fractions(second)
    at_points = tuple(map(exact, x, y)) if x and y else _rounded(rounded, first, second)
    has_letter = first.has_letter or second.has_letter
    return Value(at_points, has_letter=has_letter, is_inexact=first.is_inexact or second.is_inexact)


def _rounded(operation: Callable[[Decimal, Decimal], Decimal], x: Value, y: Value) -> tuple[Decimal, ...]:
    try:
        results = tuple(map(operation, _decimals(x), _decimals(y)))
    except DecimalException as error:
        raise UndefinedValueError from error
    if not all(result.is_finite() for result in results):
        raise UndefinedValueError
    return results


def _fractions(value: Value) -> tuple[Fraction, ...]:
    """The exact values; empty when there are none."""
    return tuple(x for x in value.at_points if isinstance(x, Fraction))


def _decimals(value: Value) -> tuple[Decimal, ...]:
    fractions = _fractions(value)
    if fractions:
        return tuple(_CONTEXT.divide(Decimal(x.numerator), Decimal(x.denominator)) for x in fractions)
    return tuple(x for x in value.at_points if isinstance(x, Decimal))
