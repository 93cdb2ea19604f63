"""Read which optimizer steps' weights are kept for a replay."""

import re
from dataclasses import dataclass

DIRECTORY = "kept_weights"  # in the run directory
_LAST = 10


@dataclass(frozen=True, slots=True)
class KeptWeights:
    """After every `interval` optimizer steps the trained weights are written; of those copies `last` stay."""

    interval: int
    last: int

    @classmethod
    def parse(cls, text: str) -> "KeptWeights":
        """Read every=N or every=N,last=M. Raises: ValueError."""
        found = re.fullmatch(r"every=(\d+)(?:,last=(\d+))?", text)
        if found is None:
            raise ValueError(f"write every=N or every=N,last=M, like every=1 or every=10,last=5; last is {_LAST} else")
        interval, last = int(found[1]), int(found[2] or _LAST)
        if interval < 1 or last < 1:
            raise ValueError("every and last must be at least 1")
        return cls(interval, last)
