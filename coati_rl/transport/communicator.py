"""One collective, broadcast from rank 0, behind which gloo and NCCL look alike.

In: a rendezvous and a rank. Out: a communicator that all members have joined. All logic of a transfer is above this
protocol, so that what is proved over gloo holds for NCCL.
"""

from typing import Protocol

import torch
from torch._C._distributed_c10d import Store

from coati_rl.transport.deadline import Deadline
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.store import connect_store, meet


class Communicator(Protocol):
    """A group of its own; no default process group is touched, since that belongs to the engine or the trainer."""

    rank: int
    world_size: int

    def broadcast(self, data: torch.Tensor, *, deadline: Deadline, what: str) -> None:
        """Send (rank 0) or receive (others) `data`, uint8[N] contiguous; returns when the bytes are there.

        Raises:
            TransferError: a peer is gone. The group is dead.
            TransferTimeoutError: the deadline passed. The group is dead; the message names rank and `what`.
        """

    def close(self) -> None:
        """Leave; the peers' operations fail at once."""


def join(rendezvous: Rendezvous, *, rank: int, device: torch.device, deadline: Deadline) -> Communicator:
    """Join the trainer's group as `rank`. Raises: TransferError, TransferTimeoutError."""

    def connect() -> Communicator:
        store = connect_store(rendezvous.host, rendezvous.port, deadline=deadline)
        return make_communicator(rendezvous, rank=rank, store=store, device=device, deadline=deadline)

    return deadline.run(connect, what=f"rank {rank} of {rendezvous.world_size}, joining")


def make_communicator(
    rendezvous: Rendezvous, *, rank: int, store: Store, device: torch.device, deadline: Deadline
) -> Communicator:
    """Meet the others on the store, then build the group. Blocks; run it under `Deadline.run`."""
    meet(store, rank=rank, world_size=rendezvous.world_size, deadline=deadline)
    if rendezvous.backend == "gloo":
        from coati_rl.transport.gloo import GlooCommunicator

        return GlooCommunicator(
            store, rank=rank, world_size=rendezvous.world_size, host=rendezvous.host, deadline=deadline
        )
    from coati_rl.transport.nccl import CupyNcclCommunicator

    return CupyNcclCommunicator(
        unique_id=rendezvous.unique_id or "", rank=rank, world_size=rendezvous.world_size, device=device
    )
