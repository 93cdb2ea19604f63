r"""Distinguish units that are written as letters from variables.

math-verify drops letters at the end of an answer as a unit, so that `3t` is 3, `\pi r^2 h` is `\pi r^2`, and `\cos t`
does not parse. Here one letter is a variable, and so are two letters unless they are one of the units below. It also
drops all from the first `\text{}` to one at the end, so that `2\text{ cm}, 3\text{ cm}` is 2.
"""

import re

_TWO_LETTERS = "cm|mm|km|dm|kg|gm|lb|ft|hr|yr|ms|am|pm|cc|sq|rd|th"
_LAST_LETTERS = re.compile(r"(?:(?P<before>\\?[A-Za-z]{2,})\s+)?(?<![A-Za-z\\])(?P<last>[A-Za-z]{1,2})\s*\}?$")
_UNIT = re.compile(rf"(?<=[\d}}])(?:\s+[A-Za-z]{{3,}}|\s*(?:{_TWO_LETTERS}))\s*(?=\}}?$)")
# Words that multiply the number before them.
NUMERALS = (
    "billions? cubed dozens? eighths? factorial fifths? fourths? half halves hundreds? hundredths? millions? ninths? "
    "quarters? sevenths? sixths? squared tenths? thirds? thousands? thousandths? trillions?"
)
_TEXT = r"\\(?:text[a-z]*|math(?:rm|it|bf)|mbox)\s*\{[^{}]*\}"
_OF_UNITS = re.compile(rf"{_TEXT}|\^\s*(?:-?\d|\{{[^{{}}]*\}})|\\(?:cdot|quad|circ)(?![A-Za-z])")
_NUMERAL = re.compile(
    r"\d(?:\\[,;: ]|~|\s)*\\[a-z]+\s*\{\s*(?:and\s+(?:an?|one)\s+)?"
    rf"(?:{NUMERALS.replace(' ', '|')})\b[^{{}}]*\}}\s*\}}?$",
    re.IGNORECASE,
)
_LISTED = r"\\[a-z]+\s*\{,?\s*(?:and|or)\s*\}"
_TWO_VALUES = re.compile(rf"\d\s*(?!{_LISTED}){_TEXT}(?:\\[,;:! ]|~|\s)*\d")


def ends_in_variables(latex: str) -> bool:
    r"""Return True if the last letters of `latex`, which may be in a `\boxed{}`, are variables and not a unit."""
    letters = _LAST_LETTERS.search(latex)
    if letters is None or letters["last"] in _TWO_LETTERS.split("|"):
        return False
    return letters["before"] is None or letters["before"].startswith("\\")  # else 4 sq m


def without_unit(latex: str) -> str:
    """Remove letters after a number that can only be a unit."""
    return _UNIT.sub("", latex)


def ends_in_numeral(latex: str) -> bool:
    r"""Return True if a text at the end changes the number before it, as in `5\text{ million}`."""
    return _NUMERAL.search(latex) is not None


def has_several_units(latex: str) -> bool:
    r"""Return True if values stand between texts that could be units, as in `2\text{ cm}, 3\text{ cm}`."""
    _, *rest = re.split(rf"(?={_TEXT})", re.sub(_LISTED, ",", latex), maxsplit=1)
    return bool(rest) and re.search("[A-Za-z0-9]", _OF_UNITS.sub("", rest[0])) is not None


def has_two_values(latex: str) -> bool:
    r"""Return True for `7\text{ feet }3\text{ inches}`, which math-verify would multiply."""
    return _TWO_VALUES.search(latex) is not None
