"""Declare the one collective that transfers use, broadcast, for gloo, NCCL and files alike.

All logic of a transfer is above this protocol, so that what is tested over gloo holds for NCCL.
"""

from typing import Protocol

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline

_MAX_TEXT_BYTES = 512


class Operation(Protocol):
    """Represent a broadcast in progress."""

    def wait(self, *, deadline: Deadline, what: str) -> None:
        """Return when the bytes have arrived; calls `deadline.check(what)` at least every `deadline.slice_s()`.

        Raises: TransferError, TransferTimeoutError; `what` names rank, phase and bucket.
        """


class Communicator(Protocol):
    """Connect members without touching the default process group, which belongs to the engine or the trainer."""

    def start(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> Operation:
        """Start sending (rank `root`) or receiving (others) `data`, uint8[N] contiguous, in use until `wait` returns.

        All members start the same operations in the same order. After an error the communicator is unusable.
        """

    def close(self) -> None:
        """Disconnect; the peers' operations fail."""


def broadcast(
    communicator: Communicator, data: torch.Tensor, *, root: int, deadline: Deadline, what: str
) -> torch.Tensor:
    """Broadcast, and wait for it. Returns: `data`."""
    communicator.start(data, root=root, deadline=deadline, what=what).wait(deadline=deadline, what=what)
    return data


def broadcast_text(communicator: Communicator, text: str, *, root: int, deadline: Deadline, what: str) -> str:
    """Return the short text of rank `root` on all ranks; over a communicator of CPU tensors."""
    raw = text.encode()
    if len(raw) > _MAX_TEXT_BYTES:
        raise TransferError(f"{what}: {len(raw)} bytes of text, at most {_MAX_TEXT_BYTES} fit")
    frame = torch.tensor(list(raw.ljust(_MAX_TEXT_BYTES, b"\0")), dtype=torch.uint8)
    broadcast(communicator, frame, root=root, deadline=deadline, what=what)
    return bytes(frame.tolist()).rstrip(b"\0").decode(errors="replace")


def barrier(communicator: Communicator, *, rank: int, world_size: int, deadline: Deadline, what: str) -> None:
    """Wait until every rank has called it; over a communicator of CPU tensors."""
    for root in range(world_size):
        whom = "the others" if root == rank else f"rank {root}"
        word = torch.zeros(1, dtype=torch.uint8)
        broadcast(communicator, word, root=root, deadline=deadline, what=f"{what}: waiting for {whom}")
