r"""Convert degrees in the argument of a trigonometric function to radians, as math-verify passes over the degrees.

`\cos 60^\circ` becomes `\cos(\frac{60\pi}{180})`, and each number with a degree sign in `\sin(90^\circ - x)` likewise.
"""

import re

_NUMBER = r"(?P<whole>\d+)(?:\.(?P<decimals>\d+))?"
_SIGN = r"\s*(?:\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\}|\\degree(?![A-Za-z]))|\\degree(?![A-Za-z]))\s*"
_DEGREES = re.compile(_NUMBER + _SIGN)
_FUNCTION = r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])\s*(?:\^\s*(?:\d|\{\s*\d+\s*\})\s*)?"
_BRACKET = r"(?:\{\s*)?(?:\\left\s*)?[({](?:[^(){}]|\{\s*\\circ\s*\})*[)}]"
_CALL = re.compile(rf"(?P<function>{_FUNCTION})(?P<argument>{_BRACKET}|\d+(?:\.\d+)?{_SIGN})")


def to_radians(latex: str) -> str:
    r"""Replace the degrees in arguments of trigonometric functions, and no others. Linear in the length of `latex`."""
    if r"\circ" not in latex and r"\degree" not in latex:
        return latex
    return _CALL.sub(_call, latex)


def _call(call: re.Match[str]) -> str:
    if degrees := _DEGREES.fullmatch(call["argument"]):
        return f"{call['function']}({_radians(degrees)})"
    return call["function"] + _DEGREES.sub(_radians, call["argument"])


def _radians(degrees: re.Match[str]) -> str:
    decimals = degrees["decimals"] or ""  # 22.5 is 225/10, which is exact
    return rf"\frac{{{int(degrees['whole'] + decimals)}\pi}}{{180{'0' * len(decimals)}}}"
