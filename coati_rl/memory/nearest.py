"""Find the smallest change of settings with which a run fits into memory.

In: changes in the order of their size, and a test whether a run with them fits. Out: those to name in a message.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Hold a change of settings."""

    flags: str  # as a user types them
    values: dict[str, Any]  # by flat field name

    def __or__(self, other: "Change") -> "Change":
        """Return both changes together."""
        return Change(flags=f"{self.flags} {other.flags}", values={**self.values, **other.values})


Fits = Callable[[Change], bool]


def nearest_changes(
    changes: Sequence[Change], fits: Fits, *, budget: Callable[[Change | None], Change | None], most: int = 3
) -> list[Change]:
    """Return up to `most` changes that fit: one setting each, or if none does by itself, the first joint one.

    Args:
        changes: of one setting each, the smallest first.
        fits: whether the run with a change fits.
        budget: the largest token budget that fits with a change, or with none; None if no budget does.
        most: changes to name.
    """
    alone = [each for each in (budget(None), *(each for each in changes if fits(each))) if each is not None]
    if alone:
        return alone[:most]
    for change in changes:
        if with_budget := budget(change):
            return [change | with_budget]
    joint: Change | None = None
    for change in changes:  # at last all that are of use together
        joint = change if joint is None else joint | change
        if fits(joint):
            return [joint]
        if with_budget := budget(joint):
            return [joint | with_budget]
    return []


def largest_that_fits(least: int, current: int, fits: Callable[[int], bool]) -> int | None:
    """Return the largest size from `least` to below `current` that fits, to within a tenth; None if `least` does not.

    Sizes are rounded down to two digits where that leaves at least `least`.
    """
    if least >= current or not fits(least):
        return None
    low, high = least, current
    while high - low > max(1, low // 10):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    unit = int(10 ** max(0, len(str(low)) - 2))
    return max(least, low // unit * unit)
