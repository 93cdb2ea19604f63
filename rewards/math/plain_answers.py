r"""Compares two plain answers: two texts flow in, the verdict that math-verify would give flows out, in microseconds.

A pair is decided where the reading of both is certain (`plain_latex`) and so is what math-verify makes of it: the same
tokens are the same expression; values that differ clearly are different; tuples, intervals and matrices are compared
part by part, sets of exact numbers as sets. Every other pair is left to math-verify.
"""

from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from itertools import pairwise

from rewards.math.plain_latex import Reading, read_plain_latex
from rewards.math.sampled_value import Value, are_same

_Interval = tuple[Fraction | Decimal, str, Fraction | Decimal, str]  # start, its bracket, end, its bracket


def are_equal_answers(first: str, second: str) -> bool | None:
    r"""Whether math-verify calls the two equal; None where that takes math-verify itself. Symmetric.

    Args: what `answer_latex.to_latex` has written, without its `\boxed{}`.
    """
    one, other = read_plain_latex(first), read_plain_latex(second)
    if one is None or other is None:
        return None
    if one.tokens == other.tokens and one.kind == other.kind:
        return True
    kinds = {one.kind, other.kind}
    if kinds == {"number", "relation"} and (one.form + other.form).endswith("="):
        return are_same(one.parts[0], other.parts[0])  # x = 3 is 3
    if kinds == {"number", "word"} and _are_exact(one.parts + other.parts):
        return False
    return _compare(one, other) if len(kinds) == 1 else None


def _compare(one: Reading, other: Reading) -> bool | None:
    match one.kind:
        case "word":
            return False
        case "number":
            return are_same(one.parts[0], other.parts[0])
        case "percentage":
            return are_same(one.parts[0], other.parts[0]) if _are_exact(one.parts + other.parts) else None
        case "set":
            return _compare_sets(one.parts, other.parts)
        case "brackets":
            return _compare_brackets(one, other)
        case "union":
            return _compare_unions(one, other)
        case "matrix":
            return _compare_matrices(one, other)
        case "relation":
            return _compare_relations(one, other)


def _compare_sets(one: tuple[Value, ...], other: tuple[Value, ...]) -> bool | None:
    if not _are_exact(one + other):
        return None
    numbers = [sorted(part.at_points[0] for part in parts) for parts in (one, other)]
    are_sets = all(x < y for elements in numbers for x, y in pairwise(elements))
    return numbers[0] == numbers[1] if are_sets else None


def _compare_brackets(one: Reading, other: Reading) -> bool | None:
    if one.form == other.form == "()":  # tuples, or open intervals
        return len(one.parts) == len(other.parts) and _compare_parts(one.parts, other.parts)
    return _compare_unions(one, other) if len(one.parts) == len(other.parts) == 2 else None


def _compare_unions(one: Reading, other: Reading) -> bool | None:
    """Unions of one or more intervals; as sets, in any order."""
    intervals, other_intervals = _intervals(one), _intervals(other)
    return None if intervals is None or other_intervals is None else intervals == other_intervals


def _intervals(reading: Reading) -> list[_Interval] | None:
    """Sorted; None where one is empty, two overlap or touch, or an end is no exact number."""
    parts = reading.parts
    if not _are_exact(part for part in parts if not part.is_infinite):
        return None
    ends = [part.at_points[0] for part in parts]
    # Infinity is no part of an interval, whatever its bracket.
    brackets = ["()"[index % 2] if part.is_infinite else reading.form[index] for index, part in enumerate(parts)]
    intervals = sorted(zip(ends[::2], brackets[::2], ends[1::2], brackets[1::2], strict=True))
    if any(start >= end for start, _, end, _ in intervals) or any(x[2] >= y[0] for x, y in pairwise(intervals)):
        return None
    return intervals


def _compare_matrices(one: Reading, other: Reading) -> bool | None:
    if not _are_exact(one.parts + other.parts):
        return None
    return one.form == other.form and _compare_parts(one.parts, other.parts)


def _compare_relations(one: Reading, other: Reading) -> bool | None:
    if not (one.form and other.form):
        return None
    are_exact = _are_exact(one.parts + other.parts)
    if one.form != other.form:
        return False if are_exact else None
    is_equation = one.form.endswith("=")
    is_equal = are_same(one.parts[0], other.parts[0]) if is_equation or are_exact else None
    # Of y = 0, math-verify compares the difference of the sides as a letter: by its name alone.
    return None if is_equal and is_equation and one.parts[0].at_points[0] == 0 else is_equal


def _compare_parts(one: Iterable[Value], other: Iterable[Value]) -> bool | None:
    found = {are_same(x, y) for x, y in zip(one, other, strict=True)}
    return False if False in found else None if None in found else True


def _are_exact(parts: Iterable[Value]) -> bool:
    """Whether all are exact numbers to math-verify."""
    return all(part.number is not None and not part.is_inexact for part in parts)
