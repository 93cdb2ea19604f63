"""Compare parsed expressions as math-verify does, without the equalities that are only differences too small for it.

A private copy of math-verify's grader is loaded, in which three comparisons are replaced; other code in the process
that imports math-verify, such as a reward function of the user's, gets the package's own.
"""

import logging
from functools import lru_cache
from importlib.util import find_spec, module_from_spec
from typing import Any

from sympy import Eq, Expr, Float, Pow, fraction, solve  # type: ignore[import-untyped]

from rewards.math.exact_values import are_different, are_far_apart

_SMALLEST_DECIMAL = 5e-7  # smaller ones are 0 to the sixth place
_RELATIVE_ERROR = 1e-6  # of a decimal for a smaller value


def verify(gold: Any, answer: Any) -> bool:
    """Return True if two expressions are equal; see `math_verify.verify`."""
    # Compare sets with relations in both directions: x <= 3 is (-oo, 3], whichever of the two is the ground truth.
    options = {"timeout_seconds": None, "raise_on_error": True, "allow_set_relation_comp": True}
    return bool(_grader().verify(gold, answer, **options))


@lru_cache(maxsize=1)
def _grader() -> Any:
    spec: Any = find_spec("math_verify.grader")
    grader: Any = module_from_spec(spec)
    spec.loader.exec_module(grader)
    # It warns that its timeouts are disabled, which is intended.
    logging.getLogger(grader.__name__).setLevel(logging.ERROR)
    comparison = _Comparison(grader)
    grader.sympy_numeric_eq, grader.sympy_symbolic_eq = comparison.numeric_eq, comparison.symbolic_eq
    grader.sympy_solve_and_compare = comparison.solve_and_compare
    return grader


class _Comparison:
    """Compare two expressions by value, then by form, in the place of the grader's functions of these names."""

    def __init__(self, grader: Any) -> None:
        self._grader = grader
        self._numeric_eq, self._symbolic_eq = grader.sympy_numeric_eq, grader.sympy_symbolic_eq
        self._solve_and_compare = grader.sympy_solve_and_compare
        self._refuted: tuple[Any, Any] | None = None  # the last pair of which values were proved to be different

    def numeric_eq(self, gold: Any, answer: Any, *options: Any) -> bool:
        if not self._numeric_eq(gold, answer, *options):
            return False
        is_refuted = _is_refuted(gold, answer, self._grader)
        self._refuted = (gold, answer) if is_refuted else None
        return not is_refuted

    def symbolic_eq(self, gold: Any, answer: Any) -> bool:
        refuted, self._refuted = self._refuted, None
        if refuted and refuted[0] is gold and refuted[1] is answer:
            return False  # found without simplifying the difference
        if self._symbolic_eq(gold, answer):
            return True
        rewritten = _with_roots_of_denominators(gold), _with_roots_of_denominators(answer)
        return rewritten != (gold, answer) and bool(self._symbolic_eq(*rewritten))

    def solve_and_compare(self, gold: Any, answer: Any, *options: Any) -> bool:
        """Compare solutions; where sympy finds none, as of f(1) = 2, nothing is equal."""
        if not self._solve_and_compare(gold, answer, *options):
            return False
        return not isinstance(gold, Eq) or bool(solve(gold, gold.free_symbols))


def _is_refuted(gold: Any, answer: Any, grader: Any) -> bool:
    """Return True if two expressions that math-verify's numeric comparison takes for equal are not."""
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)):
        return False  # the elements of matrices are compared one by one
    if not any(grader.is_atomic_or_pct_atomic(each, grader.Number) for each in (gold, answer)):
        return are_different(gold, answer)
    # Decimals are rounded to six places, at which every small value is 0.
    decimals = [each for each in (gold, answer) if isinstance(each, Float)]
    return (
        len(decimals) == 1
        and abs(decimals[0]) < _SMALLEST_DECIMAL
        and not (gold.has(Float) and answer.has(Float))
        and are_far_apart(gold, answer, relative_error=_RELATIVE_ERROR)
    )


def _with_roots_of_denominators(expression: Any) -> Any:
    r"""Write the root of a reciprocal as the reciprocal of a root: where `\sqrt{1/n}` is real it is `1/\sqrt{n}`."""
    if not isinstance(expression, Expr) or not expression.free_symbols:
        return expression

    def is_root(part: Any) -> bool:
        if not (isinstance(part, Pow) and part.exp.is_Rational and not part.exp.is_Integer and part.free_symbols):
            return False
        numerator, _ = fraction(part.base)
        return bool(numerator.is_number and numerator.is_positive)

    def reciprocal(part: Any) -> Any:
        numerator, denominator = fraction(part.base)
        return numerator**part.exp * denominator ** (-part.exp)

    return expression.replace(is_root, reciprocal)
