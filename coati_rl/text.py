"""Format parts of messages: one line of any value or error, counts, names, text of models to be shown."""

import difflib
import unicodedata
from collections.abc import Iterable

_SEPARATORS = {"Zl", "Zp"}  # Unicode categories of line and paragraph separators
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn"}  # of what a terminal acts on, reorders text by, or does not show


def printable(text: str) -> str:
    """Return text whose control, format and other hidden characters are escapes, but for line feeds and tabs.

    What a model has said must not move a terminal's cursor, or reorder what a person reads.
    """
    return "".join(each if _is_shown(each) else each.encode("unicode_escape").decode() for each in text)


def _is_shown(character: str) -> bool:
    return character in "\n\t" or unicodedata.category(character) not in _HIDDEN | _SEPARATORS


def shorten(text: object, limit: int = 80) -> str:
    """Return `text` on one line of at most `limit` characters."""
    line = " ".join(str(text)[: 4 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


def both_ends(text: str, limit: int) -> str:
    """Return `text` on one line of at most `limit` characters, at least 8: of a long one a third from its beginning.

    The rest is from its end, where an answer says what it comes to. Only the two ends of a long text are looked at.
    """
    ends = text if len(text) <= 4 * limit else f"{text[: 2 * limit]} ... {text[-2 * limit :]}"
    line = " ".join(ends.split())
    if len(line) <= limit:
        return line
    begin = (limit - 5) // 3
    return f"{line[:begin]} ... {line[len(line) - (limit - 5 - begin) :]}"


def shown_ends(text: str, limit: int) -> str:
    """Return `both_ends` of a model's or a user's text, `printable`."""
    return both_ends(printable(both_ends(text, 4 * limit)), limit)


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return a remedy for an unknown name: the nearest known one, or `otherwise`."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def count(number: int, noun: str) -> str:
    """Return "1 prompt", "2 prompts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def name_producers(ids: Iterable[int]) -> str:
    """Return "producer 0", "producers 0, 2"."""
    names = [str(producer) for producer in ids]
    return f"producer{'' if len(names) == 1 else 's'} {', '.join(names)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that is not empty, or the error's type."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
