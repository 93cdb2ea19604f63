"""A group that the senders and the engines' ranks have joined: a communicator, and lifelines that tell who has gone.

In: a hub (rank 0, the first sender) or an invitation (members). Out: broadcasts that fail with the peer's own reason.
"""

import time
from collections.abc import Sequence

import torch

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.communicator import Communicator
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.lifeline import Lifeline, LifelineHub, join_hub
from coati_rl.transport.rendezvous import Rendezvous

_LAST_WORDS_S = 0.5  # how long a reason may come, perhaps by way of rank 0, after a connection broke


class Group:
    """Rank `rank` of `world_size`; the senders come first."""

    def __init__(
        self, communicator: Communicator, lifelines: Sequence[Lifeline], *, rank: int, world_size: int
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._communicator = communicator
        self._lifelines = lifelines

    def broadcast(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> None:
        """See `Communicator.broadcast`; `what` is the phase and the bucket, the rank is added."""
        what = f"rank {self.rank} of {self.world_size}, {what}"
        try:
            self._communicator.broadcast(data, root=root, deadline=deadline.watching(self._loss), what=what)
        except TransferTimeoutError:
            raise
        except TransferError as error:
            reason = self._last_words()
            if reason is None or reason in str(error):
                raise
            raise TransferError(f"{what}: {reason}") from error

    def close(self, reason: str | None = None) -> None:
        """Leave: in peace, or with the reason for which the others' transfers fail."""
        for lifeline in self._lifelines:
            lifeline.close(reason)  # first, so that the reason is there when the connection breaks
        self._communicator.close()

    def _loss(self) -> str | None:
        return next(filter(None, (lifeline.loss() for lifeline in self._lifelines)), None)

    def _last_words(self) -> str | None:
        end = time.monotonic() + _LAST_WORDS_S
        while (loss := self._loss()) is None and time.monotonic() < end:
            time.sleep(0.005)
        return loss


def host_group(hub: LifelineHub, rendezvous: Rendezvous, *, device: torch.device, deadline: Deadline) -> Group:
    """Rank 0's side: wait for everyone, then connect. Raises: TransferError, TransferTimeoutError."""
    world_size = rendezvous.world_size
    what = f"rank 0 of {world_size}, connecting"
    lifelines = hub.gather(world_size, deadline=deadline)
    watched = deadline.watching(lambda: next(filter(None, (lifeline.loss() for lifeline in lifelines)), None))

    def connect() -> Communicator:
        if rendezvous.backend == "gloo":
            from coati_rl.transport.gloo import GlooCommunicator, open_store

            store, port = open_store(rendezvous.host)
            for lifeline in lifelines:
                lifeline.tell({"go": port})
            return GlooCommunicator(store, rank=0, world_size=world_size, host=rendezvous.host, deadline=watched)
        for lifeline in lifelines:
            lifeline.tell({"go": 0})
        return _nccl(rendezvous, rank=0, device=device)

    return Group(watched.run(connect, what=what), lifelines, rank=0, world_size=world_size)


def join_group(rendezvous: Rendezvous, *, rank: int, device: torch.device, deadline: Deadline) -> Group:
    """A member's side. Raises: TransferError, TransferTimeoutError."""
    host, world_size = rendezvous.host, rendezvous.world_size
    who = f"rank {rank} of {world_size}"
    lifeline, store_port = join_hub(
        host, rendezvous.port, rank=rank, epoch=rendezvous.epoch, what=f"{who}, joining", deadline=deadline
    )
    watched = deadline.watching(lifeline.loss)

    def connect() -> Communicator:
        if rendezvous.backend == "gloo":
            from coati_rl.transport.gloo import GlooCommunicator, connect_store

            store = connect_store(host, int(store_port))
            return GlooCommunicator(store, rank=rank, world_size=world_size, host=host, deadline=watched)
        return _nccl(rendezvous, rank=rank, device=device)

    try:
        communicator = watched.run(connect, what=f"{who}, connecting")
    except TransferError as error:
        lifeline.close(str(error))
        raise
    return Group(communicator, [lifeline], rank=rank, world_size=world_size)


def _nccl(rendezvous: Rendezvous, *, rank: int, device: torch.device) -> Communicator:
    from coati_rl.transport.nccl import CupyNcclCommunicator

    return CupyNcclCommunicator(
        unique_id=rendezvous.unique_id or "", rank=rank, world_size=rendezvous.world_size, device=device
    )
