"""Define how a program calls engines or the ranks of a trainer, wherever they are."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Arguments = Sequence[tuple[Any, ...]]  # of each member


class Members(Protocol):
    """Call engines or trainer ranks from one place: each has its own arguments, and all results come back."""

    @property
    def size(self) -> int:
        """Return the number of members."""

    def call(self, method: str, arguments: Arguments) -> list[Any]:
        """Return what each member returns. Raises: what one of them raises."""

    def begin(self, method: str, arguments: Arguments) -> Callable[[], list[Any]]:
        """Call them in the background. Returns: a function that waits for what each returns."""
