"""Shorten anything to one line for people."""


def shorten(text: object, limit: int = 80) -> str:
    """`text` on one line of at most `limit` characters."""
    line = " ".join(str(text)[: 4 * limit].split())
    return line if len(line) <= limit else line[: limit - 3] + "..."
