"""Take the memory of a rank's models off its device and bring it back, in parts, for a program of one's own."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from consumer.parking import Parking


class Residence:
    """Park and unpark parts of what a rank holds."""

    def __init__(self, device: torch.device, parts: Mapping[str, Callable[[], Iterable[Tensor]]]) -> None:
        """Begin with all parts on the device. `parts`: the tensors of each as they are then, by name."""
        self._parts = parts
        directory = Path(tempfile.gettempdir())  # where a machine without a GPU keeps what is parked
        self._parked = {part: Parking(device=device, directory=directory, flag="trainer.cpu()") for part in parts}

    def park(self, parts: Sequence[str]) -> None:
        """Take these parts off the device, if they are there. Raises: RunError if there is no room for them."""
        for part in parts:
            if not self._parked[part].num_bytes:
                self._parked[part].park(self._parts[part]())

    def unpark(self, parts: Sequence[str]) -> None:
        """Bring these parts back, if they are parked."""
        for part in parts:
            self._parked[part].unpark()
