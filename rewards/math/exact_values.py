r"""Prove that two expressions have different values: as fractions, or to hundreds of digits.

math-verify subtracts, and takes a difference below about 1e-15 for zero, so that `1/2^{55}` equals `1/2^{56}`. Here
values of integers, the four operations, integer powers, factorials and binomial coefficients are compared exactly, and
others by their relative difference, whatever their size. A variable stands for a number: expressions that differ there
are different. The work is bounded, for fractions by their size and for other values by the number of digits.
"""

from collections.abc import Callable, Mapping, Sequence
from math import comb, factorial
from typing import Any

import mpmath  # type: ignore[import-untyped]
import sympy  # type: ignore[import-untyped]
from sympy.core.function import AppliedUndef  # type: ignore[import-untyped]
from sympy.functions.elementary import hyperbolic, trigonometric  # type: ignore[import-untyped]

_MAX_BITS = 1 << 24  # of all numbers that are computed for an exact value
_DIGITS = 500  # of values of elementary functions; half of them may be lost by cancellation
_FEW_DIGITS = 30  # of values with decimals, which are binary numbers of 15 digits, and of integrals and sums
_ERROR, _DECIMAL_ERROR, _OTHER_ERROR = mpmath.mpf(10) ** (-_DIGITS // 2), mpmath.mpf("1e-12"), mpmath.mpf("1e-9")
_FIRST_PRIME = 7  # the seventh is 17: smaller numbers are often the zero of a denominator
_OF_INTEGERS = (sympy.factorial, sympy.binomial, sympy.Sum, sympy.Product)
_ELEMENTARY = (
    sympy.Number,
    sympy.NumberSymbol,
    sympy.core.numbers.ImaginaryUnit,
    sympy.Symbol,
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.UnevaluatedExpr,
    sympy.exp,
    sympy.log,
    sympy.Abs,
    sympy.factorial,
    sympy.binomial,
    trigonometric.TrigonometricFunction,
    trigonometric.InverseTrigonometricFunction,
    hyperbolic.HyperbolicFunction,
    hyperbolic.InverseHyperbolicFunction,
)

# A numerator, and a denominator that is not 0; not in lowest terms, as the greatest common divisor would take longest.
_Fraction = tuple[int, int]
# A complex value and the size of its error.
_Approximation = tuple[Any, Any]
_Values = Mapping[Any, Any]  # of variables: integers or fractions


def are_different(first: Any, second: Any) -> bool:
    """Return True if two sympy expressions are proved to have different values; False if equal or undecided."""
    if functions := first.atoms(AppliedUndef) | second.atoms(AppliedUndef):  # f(x) is as good as a variable
        names = {function: sympy.Dummy(str(function)) for function in functions}
        first, second = first.xreplace(names), second.xreplace(names)
    variables = sorted(first.free_symbols | second.free_symbols, key=str)
    if variables and (difference := first - second).is_Rational:
        return bool(difference != 0)
    values = {variable: sympy.prime(number) for number, variable in enumerate(variables, _FIRST_PRIME)}
    fraction, other = _Exact(values).fraction(first), _Exact(values).fraction(second)
    if fraction and other:
        return fraction[0] * other[1] != other[0] * fraction[1]
    digits, error = _precision(first, second)
    if not (first.has(*_OF_INTEGERS) or second.has(*_OF_INTEGERS)):  # values near 1 keep towers of powers small
        values = {variable: 1 + sympy.Rational(1, prime) for variable, prime in values.items()}
    with mpmath.workdps(_DIGITS):
        return _differ(_approximation(first, values, digits), _approximation(second, values, digits), error)


def are_far_apart(first: Any, second: Any, *, relative_error: float) -> bool:
    """Return True if two expressions without variables are proved to differ by more than a part of the larger one."""
    with mpmath.workdps(_FEW_DIGITS):
        return _differ(_approximation(first, {}, _FEW_DIGITS), _approximation(second, {}, _FEW_DIGITS), relative_error)


class _Exact:
    """Compute exact values of expressions, until the numbers computed have too many bits together."""

    def __init__(self, values: _Values) -> None:
        self._values = values
        self._bits_left = _MAX_BITS

    def fraction(self, expression: Any) -> _Fraction | None:
        """Return the value; None if it is not rational, not defined, or too large."""
        if expression.is_Rational:
            return expression.p, expression.q
        if expression in self._values:
            return int(self._values[expression]), 1
        if (operation := _OPERATIONS.get(expression.func)) is None:
            return None
        parts = []
        for argument in expression.args:
            if (part := self.fraction(argument)) is None:
                return None
            parts.append(part)
        return operation(self, parts)

    def sum(self, parts: Sequence[_Fraction]) -> _Fraction | None:
        numerator, denominator = 0, 1
        for upper, lower in parts:
            if not self._can_have(numerator.bit_length() + denominator.bit_length() + _bits((upper, lower))):
                return None
            numerator, denominator = numerator * lower + upper * denominator, denominator * lower
        return numerator, denominator

    def product(self, parts: Sequence[_Fraction]) -> _Fraction | None:
        numerator, denominator = 1, 1
        for upper, lower in parts:
            if not self._can_have(numerator.bit_length() + denominator.bit_length() + _bits((upper, lower))):
                return None
            numerator, denominator = numerator * upper, denominator * lower
        return numerator, denominator

    def power(self, parts: Sequence[_Fraction]) -> _Fraction | None:
        (upper, lower), exponent = parts[0], _integer(parts[1])
        if exponent is None or not self._can_have(_bits(parts[0]) * abs(exponent)):
            return None
        if exponent < 0:
            upper, lower, exponent = lower, upper, -exponent
        return (upper**exponent, lower**exponent) if lower else None

    def factorial(self, parts: Sequence[_Fraction]) -> _Fraction | None:
        number = _integer(parts[0])
        if number is None or number < 0 or not self._can_have(number * number.bit_length()):
            return None
        return factorial(number), 1

    def binomial(self, parts: Sequence[_Fraction]) -> _Fraction | None:
        number, chosen = map(_integer, parts)
        if number is None or chosen is None or min(number, chosen) < 0 or not self._can_have(number):
            return None
        return comb(number, chosen), 1

    def _can_have(self, num_bits: int) -> bool:
        self._bits_left -= num_bits
        return self._bits_left >= 0


_OPERATIONS: Mapping[Any, Callable[[_Exact, Sequence[_Fraction]], _Fraction | None]] = {
    sympy.Add: _Exact.sum,
    sympy.Mul: _Exact.product,
    sympy.Pow: _Exact.power,
    sympy.factorial: _Exact.factorial,
    sympy.binomial: _Exact.binomial,
    sympy.UnevaluatedExpr: lambda _, parts: parts[0],
}


def _bits(value: _Fraction) -> int:
    return value[0].bit_length() + value[1].bit_length()


def _integer(value: _Fraction) -> int | None:
    number, rest = divmod(value[0], value[1])
    return None if rest else number


def _precision(*expressions: Any) -> tuple[int, Any]:
    """Return the digits to compute values to, and the relative difference from which they count as different."""
    parts = [part for expression in expressions for part in sympy.preorder_traversal(expression)]
    if not all(isinstance(part, _ELEMENTARY) for part in parts):
        return _FEW_DIGITS, _OTHER_ERROR
    return (_FEW_DIGITS, _DECIMAL_ERROR) if any(part.is_Float for part in parts) else (_DIGITS, _ERROR)


def _approximation(expression: Any, values: _Values, digits: int) -> _Approximation | None:
    """Return the value; None if there is none, as that of an infinite limit."""
    try:
        parts = expression.evalf(digits, subs=values).as_real_imag()
    except (RecursionError, MemoryError):
        raise
    except Exception:  # noqa: BLE001 - sympy raises anything for what it cannot compute
        return None
    value, error = mpmath.mpc(0), mpmath.mpf(0)
    for part, unit in zip(parts, (1, mpmath.mpc(0, 1)), strict=True):
        if part.is_zero:
            continue
        if not part.is_Float or not part.is_finite:
            return None
        size = mpmath.mpf(part._mpf_)
        # sympy gives as many binary digits as are right, and one where none is.
        value, error = value + unit * size, error + abs(size) * mpmath.mpf(2) ** (2 - part._prec)
    return value, error


def _differ(first: _Approximation | None, second: _Approximation | None, relative_error: Any) -> bool:
    if first is None or second is None:
        return False
    difference = abs(first[0] - second[0])
    return bool(difference > first[1] + second[1] and difference > relative_error * max(abs(first[0]), abs(second[0])))
