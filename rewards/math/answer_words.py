r"""Compare answers as texts, where math-verify cannot read them or reads words as products.

math-verify reads letters as factors in any order, so that `no` equals `on`, and `AB` equals `BA`. Text that it cannot
read is equal to nothing, not even to itself.
"""

import re

from rewards.math.answer_latex import clean
from rewards.math.extraction import has_balanced_braces

_DELIMITER = re.compile(r"(?<!\\)(?:\$|\\[()\[\]])")
_SPACE = re.compile(r"(?:\\[,;:! ]|~|\s)+")
_IDLE_SPACE = re.compile(r"(?<!\d) | (?!\d)")  # not between digits: 3 1/2 is not 31/2
_LETTERS = re.compile(r"\(?(?:\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit)\{)?\(?([A-Za-z]{2,})\)?\}?\)?")
_NO_VARIABLE = re.compile("[A-Zeio]")  # points and choices; e and i are constants, o is not used as a variable
_VARIABLE = re.compile(r"\\(?:text\w*|mathrm|begin|end)\s*\{[^{}]{2,}\}|(\\[A-Za-z]+|[A-Za-z])")  # not of words
_CUT_OFF = re.compile(r"[-=+*/^_,;(\[<>\\]$")


def is_same_text(answer: str, ground_truth: str) -> bool:
    r"""Return True if both are the same complete text, apart from space, delimiters of formulas and a full stop."""
    text, truth = (
        _IDLE_SPACE.sub("", _SPACE.sub(" ", _DELIMITER.sub(" ", clean(each)))).strip()
        for each in (answer, ground_truth)
    )
    return text == truth != "" and has_balanced_braces(truth) and _CUT_OFF.search(truth) is None


def is_reordered_word(answer: str, ground_truth: str) -> bool:
    r"""Return True if the answer has the letters of a word, or of the name of a segment, in another order.

    Letters that usually name variables are a product, whose order does not matter: `yx` is `xy`.
    """
    matches = [_LETTERS.fullmatch(_SPACE.sub("", clean(each))) for each in (answer, ground_truth)]
    letters, truth = (match[1] if match else "" for match in matches)
    is_reordered = sorted(letters.lower()) == sorted(truth.lower()) and letters.lower() != truth.lower()
    return is_reordered and _NO_VARIABLE.search(letters + truth) is not None


def has_both_cases(latex: str) -> bool:
    r"""Return True if a letter names a variable as a capital and as a small one, as in `R^2-r^2`."""
    names = set(_VARIABLE.findall(latex))
    return any(name != name.lower() and name.lower() in names for name in names)
