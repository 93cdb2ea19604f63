"""Draw the curve of a number over a whole run in a few characters."""

import math
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.-~=+*#"  # from low to high, where a terminal's encoding lacks the others
MAX_POINTS = 20


class Curve:
    """Keep a run's values as at most MAX_POINTS means of equally many values each, the last one of those so far."""

    def __init__(self) -> None:
        self.last: float | None = None
        self._means: list[float] = []
        self._per_mean = 1
        self._sum, self._count = 0.0, 0  # of the mean that is not complete

    def add(self, value: float | None) -> None:
        """Take the next step's value; one that is not a finite number is left out."""
        if value is None or not math.isfinite(value):
            return
        self.last = value
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._per_mean:
            return
        self._means.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self._means) == MAX_POINTS:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means, self._per_mean = [(a + b) / 2 for a, b in pairs], 2 * self._per_mean

    def points(self) -> list[float]:
        """Return the means, in order; may be called from another thread than `add`."""
        means, total, count = list(self._means), self._sum, self._count
        return [*means, total / count] if count else means


def sparkline(points: Sequence[float], bars: str = BARS, *, resolution: float = 0.0) -> str:
    """Return a character a point: the lowest of `bars` for the smallest point, the highest for the largest.

    Nothing for fewer than two points; the lowest for all that differ by at most `resolution`, which are noise.
    """
    if len(points) < 2:
        return ""
    low, high = min(points), max(points)
    scale = (len(bars) - 1) / (high - low) if high - low > resolution else 0.0
    return "".join(bars[round((point - low) * scale)] for point in points)
