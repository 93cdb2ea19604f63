r"""Write characters outside of ASCII as LaTeX: signs, fractions such as 3/4 in one character, raised digits."""

import re
from unicodedata import normalize

_FRACTIONS = "¼½¾⅐⅑⅒⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_RAISED = "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ"
_SIGNS = {
    "\N{EN DASH}": "-",
    "\N{MINUS SIGN}": "-",
    "\N{HYPHEN}": "-",
    "\N{NON-BREAKING HYPHEN}": "-",
    "\N{SMALL HYPHEN-MINUS}": "-",
    "\N{FRACTION SLASH}": "/",
    "\N{DIVISION SLASH}": "/",
    "\N{MIDDLE DOT}": r"\cdot ",
    "\N{MULTIPLICATION SIGN}": r"\times ",
    "\N{DEGREE SIGN}": r"^\circ ",
    "\N{INFINITY}": r"\infty ",
    "\N{ALMOST EQUAL TO}": r"\approx ",
    "\N{PRIME}": "'",
    "\N{DOUBLE PRIME}": "''",
    "\N{RIGHT SINGLE QUOTATION MARK}": "'",
    "\N{IDEOGRAPHIC SPACE}": " ",
}


def _fraction(character: str) -> str:
    numerator, denominator = normalize("NFKC", character).split("\N{FRACTION SLASH}")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


_TABLE = str.maketrans(
    _SIGNS
    | {character: _fraction(character) for character in _FRACTIONS}
    # Fullwidth forms of ASCII: models write fullwidth digits among Chinese and Japanese text.
    | {chr(code + 0xFEE0): chr(code) for code in range(ord("!"), ord("~") + 1)}
)
_EXPONENT = re.compile(f"[{_RAISED}]+")


def without_symbols(text: str) -> str:
    """Replace the characters that have a notation in LaTeX. Linear in the length of `text`."""
    if text.isascii():
        return text
    return _EXPONENT.sub(_exponent, text).translate(_TABLE)


def _exponent(raised: re.Match[str]) -> str:
    digits = normalize("NFKC", raised[0]).replace("\N{MINUS SIGN}", "-")
    return f"^{digits}" if len(digits) == 1 else f"^{{{digits}}}"
