"""Keep numbered events for the driver until the driver asks for later ones."""

from typing import Any


class EventLog:
    """In the order in which they happened."""

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._num_forgotten = 0

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Something happened."""
        self._events.append({"event": kind, **fields})

    def forget(self, number: int) -> None:
        """The events before this number have arrived."""
        del self._events[: number - self._num_forgotten]
        self._num_forgotten = number

    def kept(self) -> list[dict[str, Any]]:
        """All that are not forgotten."""
        return list(self._events)
