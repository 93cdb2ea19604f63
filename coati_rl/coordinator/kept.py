"""Name the attributes that make up the state of a part of the coordinator, so that another coordinator can take over.

What is not named follows from the settings or from other parts.
"""

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol


class Kept(Protocol):
    """A part of the coordinator whose state outlives its process."""

    KEPT: ClassVar[tuple[str, ...]]  # names of its attributes


def kept(part: Kept) -> dict[str, Any]:
    """Return the values of the attributes, not copied."""
    return {name: getattr(part, name) for name in part.KEPT}


def restore(part: Kept, values: Mapping[str, Any]) -> None:
    """Set the attributes; a dict stays the same object, which other parts may have. Raises: KeyError."""
    for name in part.KEPT:
        value, current = values[name], getattr(part, name)
        if isinstance(current, deque):
            value = deque(value, current.maxlen)
        if isinstance(current, dict) and not isinstance(current, Counter):
            current.clear()
            current.update(value)
        else:
            setattr(part, name, value)
