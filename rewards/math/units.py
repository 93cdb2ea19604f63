r"""Distinguish units that are written as letters from variables.

math-verify drops letters at the end of an answer as a unit, so that `3t` is 3, `\pi r^2 h` is `\pi r^2`, and `\cos t`
does not parse. Here one letter is a variable, and so are two letters unless they are one of the units below.
"""

import re

_TWO_LETTERS = "cm|mm|km|dm|kg|gm|lb|ft|hr|yr|ms|am|pm|cc|sq|rd|th"
_LAST_LETTERS = re.compile(r"(?:(?P<before>\\?[A-Za-z]{2,})\s+)?(?<![A-Za-z\\])(?P<last>[A-Za-z]{1,2})\s*\}?$")
_UNIT = re.compile(rf"(?<=[\d}}])(?:\s+[A-Za-z]{{3,}}|\s*(?:{_TWO_LETTERS}))\s*(?=\}}?$)")


def ends_in_variables(latex: str) -> bool:
    r"""Return True if the last letters of `latex`, which may be in a `\boxed{}`, are variables and not a unit."""
    letters = _LAST_LETTERS.search(latex)
    if letters is None or letters["last"] in _TWO_LETTERS.split("|"):
        return False
    return letters["before"] is None or letters["before"].startswith("\\")  # else 4 sq m


def without_unit(latex: str) -> str:
    """Remove letters after a number that can only be a unit."""
    return _UNIT.sub("", latex)
