r"""Expand `\pm` to two values where math-verify does not: inside braces, and in a list of equations.

`\frac{-1\pm\sqrt{13}}{4}` becomes `\frac{-1+\sqrt{13}}{4},\frac{-1-\sqrt{13}}{4}`, and `x=0, x=\pm2` becomes
`x=0, x=2, x=-2`. Elsewhere math-verify expands it, and several in one value are ambiguous.
"""

import re

_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*")
_TOKEN = re.compile(r"\\.|[{}()\[\],]", re.DOTALL)
_STARTS_VALUE = re.compile(r"(?:^|[={(\[])\s*$")  # a sign at the start of a value; a plus is omitted there


def expand_plus_minus(text: str) -> str:
    r"""Return the list with each value that needs it replaced by two. Linear in the length of `text`."""
    if r"\pm" not in text:
        return text
    values = _split(text)
    are_equations = len(values) > 1 and all("=" in value for value, _ in values)
    expanded = []
    for value, is_in_braces in values:
        if (is_in_braces or are_equations) and len(_PLUS_MINUS.findall(value)) == 1:
            before, after = _PLUS_MINUS.split(value)
            plus = "" if _STARTS_VALUE.search(before) else "+"
            expanded += [f"{before}{plus}{after}", f"{before}-{after}"]
        else:
            expanded.append(value)
    return ",".join(expanded)


def _split(text: str) -> list[tuple[str, bool]]:
    r"""Split at commas outside of brackets. Returns: each part, and whether it has a `\pm` inside braces."""
    parts: list[tuple[str, bool]] = []
    start = num_braces = num_brackets = 0
    is_in_braces = False
    for token in _TOKEN.finditer(text):
        symbol = token[0]
        if symbol in ("{", "}"):
            num_braces += 1 if symbol == "{" else -1
        elif symbol in ("(", "[", r"\{", ")", "]", r"\}"):
            num_brackets += 1 if symbol in ("(", "[", r"\{") else -1
        elif symbol == "," and not num_braces and not num_brackets:
            parts.append((text[start : token.start()], is_in_braces))
            start, is_in_braces = token.end(), False
        elif symbol == r"\p" and num_braces and _PLUS_MINUS.match(text, token.start()):
            is_in_braces = True
    return [*parts, (text[start:], is_in_braces)]
