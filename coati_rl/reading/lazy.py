"""Make the items of a sequence when they are asked for: of the rows of files, one source after the other."""

from abc import abstractmethod
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, overload

Item = TypeVar("Item", covariant=True)
Row = TypeVar("Row", covariant=True)


class LazySequence(Sequence[Item]):
    """Hold what items are made of; a slice is a list of them."""

    @abstractmethod
    def item(self, number: int) -> Item:
        """Make the item with a number, from 0. Raises: IndexError; RunError for a file that has changed."""

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        if isinstance(index, slice):
            return [self.item(number) for number in range(*index.indices(len(self)))]
        return self.item(index)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[Row]):
    """Hold the rows of a source, and which of them have an item."""

    rows: Sequence[Row]
    name: str = ""
    first: int = 0  # number of the first row, over all sources
    usable: "array[int]" = field(default_factory=lambda: array("I"))  # numbers of rows in the source, ascending


class LazyParts(LazySequence[Item], Generic[Item, Row]):
    """Make an item of each usable row, part after part."""

    def __init__(self, parts: Iterator[Part[Row]]) -> None:
        """Take the parts, of which a first pass has found the usable rows."""
        self._parts = [*parts]
        self.sizes = tuple(len(part.usable) for part in self._parts)
        self.num_unusable = sum(len(part.rows) for part in self._parts) - sum(self.sizes)

    @abstractmethod
    def made(self, part: Part[Row], number: int) -> Item:
        """Make the item of row `number` of a part. Raises: RunError for a file that has changed."""

    def item(self, number: int) -> Item:
        """Make the item of a usable row, counted over all parts."""
        place = number
        for part in self._parts:
            if 0 <= place < len(part.usable):
                return self.made(part, part.usable[place])
            place -= len(part.usable)
        raise IndexError(number)

    def __len__(self) -> int:
        """Return the number of items."""
        return sum(self.sizes)
