"""Word counts and producers for messages."""

from collections.abc import Iterable


def count(number: int, noun: str) -> str:
    """Return "1 prompt", "2 prompts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def name_producers(ids: Iterable[int]) -> str:
    """Return "producer 0", "producers 0, 2"."""
    names = [str(producer) for producer in ids]
    return f"producer{'' if len(names) == 1 else 's'} {', '.join(names)}"
