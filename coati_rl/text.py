"""Format parts of messages: one line of any value or error, counts, names of producers."""

from collections.abc import Iterable


def shorten(text: object, limit: int = 80) -> str:
    """Return `text` on one line of at most `limit` characters."""
    line = " ".join(str(text)[: 4 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


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
