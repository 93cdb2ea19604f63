"""One collective, broadcast, behind which gloo and NCCL look alike.

All logic of a transfer is above this protocol, so that what is proved over gloo holds for NCCL.
"""

from typing import Protocol

import torch

from coati_rl.transport.deadline import Deadline


class Communicator(Protocol):
    """Members that are connected; no default process group is touched, which belongs to the engine or the trainer."""

    def broadcast(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> None:
        """Send (rank `root`) or receive (others) `data`, uint8[N] contiguous; returns when the bytes are there.

        Calls `deadline.check(what)` at least every `deadline.slice_s()`. After an error it is of no further use.

        Raises: TransferError, TransferTimeoutError; `what` names rank, phase and bucket.
        """

    def close(self) -> None:
        """Leave; the peers' operations fail."""
