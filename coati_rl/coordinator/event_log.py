"""Keep numbered events until the driver acknowledges them by requesting later ones."""

from typing import Any, ClassVar


class EventLog:
    """Hold events in the order in which they happened."""

    KEPT: ClassVar = ("_events", "_num_acknowledged")

    def __init__(self) -> None:
        self._events: list[dict[str, Any]] = []
        self._num_acknowledged = 0

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Append an event."""
        self._events.append({"event": kind, **fields})

    def acknowledge(self, number: int) -> None:
        """Discard the events before this number, which the driver has received; a call that is late changes nothing."""
        if number > self._num_acknowledged:
            del self._events[: number - self._num_acknowledged]
            self._num_acknowledged = number

    def unacknowledged(self) -> list[dict[str, Any]]:
        """Return all events that are not discarded."""
        return list(self._events)
