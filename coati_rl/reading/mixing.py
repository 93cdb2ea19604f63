"""Interleave sources by their shares: which source each draw is of, and which of its rows.

After any number of draws n, a source of share s has had more than n * s - 1 and fewer than n * s + 1 of them. Each is
drawn in passes over all its rows, in an order that only the seed decides, however long the passes of the others are.
K sources.
"""

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import lcm


class Interleaving:
    """Decide the source of each draw, from 0; draw j of source k is due in its own window of draws.

    The window of draw j (from 0) is [floor(j / s), ceil((j + 1) / s)). Of the sources whose window has begun, the one
    whose window ends first is drawn, which always succeeds on time: Baruah et al., "Proportionate progress", 1996.
    """

    def __init__(self, shares: Sequence[Fraction]) -> None:
        """Take shares of which the sum is 1. Raises: ValueError if it is not."""
        if sum(shares) != 1 or min(shares, default=Fraction(0)) <= 0:
            raise ValueError(f"shares {[float(share) for share in shares]} must be above 0, with a sum of 1")
        self._period = lcm(*(share.denominator for share in shares))  # draws after which the same order begins again
        self._weights = [int(share * self._period) for share in shares]
        self._counts = [0] * len(shares)
        self._sources = array("I")
        self._places = array("Q")

    def at(self, number: int) -> tuple[int, int]:
        """Return the source of draw `number`, and how many draws of it came before."""
        periods, place = divmod(number, self._period)
        while len(self._sources) <= place:
            self._decide()
        source = self._sources[place]
        return source, periods * self._weights[source] + self._places[place]

    def _decide(self) -> None:
        number, period = len(self._sources), self._period
        begun = [k for k, weight in enumerate(self._weights) if self._counts[k] * period // weight <= number]
        source = min(begun, key=lambda k: (-(-(self._counts[k] + 1) * period // self._weights[k]), k))
        self._sources.append(source)
        self._places.append(self._counts[source])
        self._counts[source] += 1


class MixedOrder:
    """Number the rows of K sources, one after the other, and draw them by their shares."""

    def __init__(self, sizes: Sequence[int], shares: Sequence[Fraction], *, seed: int) -> None:
        """Take the number of rows of each source, at least one, and its share."""
        if len(sizes) != len(shares) or min(sizes) < 1:
            raise ValueError(f"{len(shares)} shares need as many sources with rows; the sizes are {list(sizes)}")
        self._sizes, self._seed = tuple(sizes), seed
        self._starts = [sum(sizes[:k]) for k in range(len(sizes))]
        self._interleaving = Interleaving(shares)

    def draw(self, number: int) -> tuple[int, int]:
        """Return the row of draw `number`, from 0, and the pass over its source that it is in."""
        source, place = self._interleaving.at(number)
        row, passed = row_of_pass(place, self._sizes[source], seed=self._seed, source=source)
        return self._starts[source] + row, passed


def row_of_pass(place: int, size: int, *, seed: int, source: int) -> tuple[int, int]:
    """Return the row of draw `place` of a source, from 0, and the pass over its rows that it is in."""
    passed, place = divmod(place, size)
    return _shuffled(f"{seed}/{source}/{passed}", size)[place], passed


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """Describe sources that stand one after the other, and how they are mixed."""

    sizes: tuple[int, ...]  # rows of each
    shares: tuple[Fraction, ...]  # of the draws, with a sum of 1

    @property
    def as_text(self) -> str:
        """Return what has to be the same for a position to be valid."""
        return ", ".join(f"{size} rows: {share}" for size, share in zip(self.sizes, self.shares, strict=True))

    def order(self, seed: int) -> MixedOrder:
        """Return the order of draws."""
        return MixedOrder(self.sizes, self.shares, seed=seed)


@lru_cache(maxsize=64)
def _shuffled(seed: str, size: int) -> list[int]:
    order = list(range(size))
    random.Random(seed).shuffle(order)
    return order
