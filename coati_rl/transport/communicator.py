"""One collective, broadcast, behind which gloo and NCCL look alike.

All logic of a transfer is above this protocol, so that what is proved over gloo holds for NCCL.
"""

from typing import Protocol

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline

_MAX_TEXT_BYTES = 512


class Operation(Protocol):
    """A broadcast that is under way."""

    def wait(self, *, deadline: Deadline, what: str) -> None:
        """Return when the bytes are there; calls `deadline.check(what)` at least every `deadline.slice_s()`.

        Raises: TransferError, TransferTimeoutError; `what` names rank, phase and bucket.
        """


class Communicator(Protocol):
    """Members that are connected; no default process group is touched, which belongs to the engine or the trainer."""

    def start(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> Operation:
        """Begin to send (rank `root`) or receive (others) `data`, uint8[N] contiguous, which is left alone meanwhile.

        All members start the same operations in the same order. After an error it is of no further use.
        """

    def close(self) -> None:
        """Leave; the peers' operations fail."""


def broadcast(
    communicator: Communicator, data: torch.Tensor, *, root: int, deadline: Deadline, what: str
) -> torch.Tensor:
    """Start and wait. Returns: `data`."""
    communicator.start(data, root=root, deadline=deadline, what=what).wait(deadline=deadline, what=what)
    return data


def broadcast_text(communicator: Communicator, text: str, *, root: int, deadline: Deadline, what: str) -> str:
    """A short text of rank `root`, whatever the others pass; over a communicator of CPU tensors."""
    raw = text.encode()
    if len(raw) > _MAX_TEXT_BYTES:
        raise TransferError(f"{what}: {len(raw)} bytes of text, at most {_MAX_TEXT_BYTES} fit")
    frame = torch.tensor(list(raw.ljust(_MAX_TEXT_BYTES, b"\0")), dtype=torch.uint8)
    broadcast(communicator, frame, root=root, deadline=deadline, what=what)
    return bytes(frame.tolist()).rstrip(b"\0").decode(errors="replace")


def meet(communicator: Communicator, *, rank: int, world_size: int, deadline: Deadline, what: str) -> None:
    """Return when every rank has called it. CPU tensors."""
    for root in range(world_size):
        whom = "the others" if root == rank else f"rank {root}"
        word = torch.zeros(1, dtype=torch.uint8)
        broadcast(communicator, word, root=root, deadline=deadline, what=f"{what}: waiting for {whom}")
