"""Take the memory of a rank's models off its device and bring it back, in parts, for a program of one's own."""

import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from consumer.tensor_offload import TensorOffload


class OffloadedParts:
    """Offload and onload parts of what a rank holds."""

    def __init__(self, device: torch.device, parts: Mapping[str, Callable[[], Iterable[Tensor]]]) -> None:
        """Begin with all parts on the device. `parts`: the tensors of each as they are then, by name."""
        self._parts = parts
        directory = Path(tempfile.gettempdir())  # where a machine without a GPU keeps what is offloaded
        self._offloaded = {
            part: TensorOffload(device=device, directory=directory, flag="trainer.cpu()") for part in parts
        }

    def offload(self, parts: Sequence[str]) -> None:
        """Take these parts off the device, if they are there. Raises: RunError if there is no room for them."""
        for part in parts:
            if not self._offloaded[part].num_bytes:
                self._offloaded[part].offload(self._parts[part]())

    def onload(self, parts: Sequence[str]) -> None:
        """Bring these parts back, if they are offloaded."""
        for part in parts:
            self._offloaded[part].onload()
