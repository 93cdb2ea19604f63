"""Say where the trainers' store is; without torch, as the driver passes it on."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreLocation:
    """Locate the trainers' store: a TCP port of rank 0, or a file."""

    address: str  # of rank 0; the other ranks use the network interface that reaches it
    port: int = 0  # of the store; 0: the store is a file
    file: Path | None = None
