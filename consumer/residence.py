"""Take the memory of a trainer's models off their device and bring it back, in parts, for a program of one's own."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from consumer.model_tensors import optimizer_tensors_of, weights_of
from consumer.parking import Parking

if TYPE_CHECKING:
    from consumer.backend import Backend
    from consumer.role_models import RoleModel

TENSORS: dict[str, Callable[["RoleModel"], Iterator[Tensor]]] = {
    "weights": weights_of,  # of all models
    "optimizer": optimizer_tensors_of,  # masters and states of those that are trained
}


class Residence:
    """Park and unpark the parts of a backend's models; not collective."""

    def __init__(self, backend: "Backend") -> None:
        """Begin with all parts on the device."""
        self._backend = backend
        # A machine without a GPU keeps what is parked in a file without a name.
        directory = Path(tempfile.gettempdir())
        self._parked = {part: Parking(device=backend.device, directory=directory) for part in TENSORS}

    def park(self, parts: Sequence[str]) -> None:
        """Take these parts off the device, if they are there. Raises: RunError if there is no room for them."""
        for part in parts:
            if not self._parked[part].num_bytes:
                self._parked[part].park(
                    each for model in self._backend.models.values() for each in TENSORS[part](model)
                )

    def unpark(self, parts: Sequence[str]) -> None:
        """Bring these parts back, if they are parked."""
        for part in parts:
            self._parked[part].unpark()
