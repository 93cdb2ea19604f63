r"""Refuse an answer that is too long, too deeply nested or has too large an exponent, before math-verify reads it.

Models write such text by accident (`1e999999999`, `9^{9^{9^9}}`, hundreds of brackets), and math-verify would take
seconds and hundreds of MiB over it. Nothing else that takes long is told from the text (`20!!`, one integral of two):
that is left to the time limit of the reward's worker.
"""

import re

MAX_LENGTH = 1000  # characters
_MAX_DEPTH = 10  # brackets in brackets
_MAX_EXPONENT = 1_000_000  # of a number or a bracket; a letter may have any

_BRACKET = re.compile(r"(?P<opening>[(\[{])|[)\]}]")
_EXPONENT = re.compile(r"[0-9)\]}!]\s*\^(?:[\s{(+-]|\\left)*([0-9]+)")
_POWER = re.compile(r"(?<![0-9.])([0-9]+)\s*\^\s*(?:\{\s*([0-9]+)\s*\}|([0-9]+))")


def find_poison(latex: str) -> str | None:
    r"""Why math-verify is not to read `latex`, in words for people; None when it may.

    Args:
        latex: what `answer_latex.to_latex` has written, so that `1e999999999` is a power of ten here.
    """
    if len(latex) > MAX_LENGTH:
        return f"it is longer than {MAX_LENGTH:,} characters"
    if _depth(latex) > _MAX_DEPTH:
        return f"it is nested more than {_MAX_DEPTH} deep"
    if _has_large_exponent(latex):
        return f"it has an exponent of more than {_MAX_EXPONENT:,}"
    return None


def _depth(latex: str) -> int:
    depth = deepest = 0
    for bracket in _BRACKET.finditer(latex):
        depth = depth + 1 if bracket["opening"] else max(depth - 1, 0)
        deepest = max(deepest, depth)
    return deepest


def _has_large_exponent(latex: str) -> bool:
    """Powers of two numbers are computed, the innermost first: they may be exponents of others."""
    for _ in range(_MAX_DEPTH + 1):
        if any(int(exponent) > _MAX_EXPONENT for exponent in _EXPONENT.findall(latex)):
            return True
        latex, num_powers = _POWER.subn(_value, latex)
        if not num_powers:
            break
    return False


def _value(power: re.Match[str]) -> str:
    base, exponent = int(power[1]), int(power[2] or power[3])
    value = base ** min(exponent, _MAX_EXPONENT.bit_length())  # 2 to so many is already too large an exponent
    return f" {min(value, _MAX_EXPONENT + 1)} "
