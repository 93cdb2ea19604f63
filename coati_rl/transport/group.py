"""Connect the senders and the engines' ranks: a communicator, and peers that tell who has gone.

In: a hub (rank 0, the first sender) or an invitation (members). Out: broadcasts that fail with the peer's own reason.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.carrier import Carrier
from coati_rl.transport.collective import CollectiveCarrier
from coati_rl.transport.communicator import Communicator, broadcast
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.file_communicator import FileCommunicator
from coati_rl.transport.files import FileCarrier
from coati_rl.transport.manifest import Bucket
from coati_rl.transport.peer_connection import PeerConnection, PeerHub, join_hub
from coati_rl.transport.rendezvous import Rendezvous
from coati_rl.transport.segments import Segment, SegmentCarrier
from coati_rl.transport.shm import ShmSegment

_LAST_WORDS_S = 0.5  # how long a reason may come, perhaps by way of rank 0, after a connection broke


class Group:
    """Rank `rank` of `world_size`; the senders come first. A `Carrier` whose errors name rank, phase and cause."""

    def __init__(
        self,
        communicator: Communicator,
        carrier: Carrier,
        peers: Sequence[PeerConnection],
        *,
        rank: int,
        world_size: int,
        device: torch.device,
    ) -> None:
        """`device`: of what the communicator broadcasts."""
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._communicator = communicator
        self._carrier = carrier
        self._peers = peers

    def begin(
        self, buckets: Sequence[Bucket], *, device: torch.device, is_staging: bool, deadline: Deadline, what: str
    ) -> None:
        """See `Carrier.begin`."""
        with self._explained(deadline, what) as (watched, named):
            self._carrier.begin(buckets, device=device, is_staging=is_staging, deadline=watched, what=named)

    def buffer(self, index: int) -> torch.Tensor:
        """See `Carrier.buffer`."""
        return self._carrier.buffer(index)

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `Carrier.start`; `what` is the phase and the bucket, the rank is added."""
        with self._explained(deadline, what) as (watched, named):
            self._carrier.start(index, deadline=watched, what=named)

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `Carrier.finish`."""
        with self._explained(deadline, what) as (watched, named):
            self._carrier.finish(index, deadline=watched, what=named)

    def broadcast(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> None:
        """A few bytes beside the buckets."""
        with self._explained(deadline, what) as (watched, named):
            broadcast(self._communicator, data, root=root, deadline=watched, what=named)

    def end(self) -> None:
        """See `Carrier.end`."""
        self._carrier.end()

    def close(self, reason: str | None = None) -> None:
        """Leave: in peace, or with the reason for which the others' transfers fail."""
        has_failed = reason is not None or self._loss() is not None
        for peer_connection in self._peers:
            peer_connection.close(reason)  # first, so that the reason is there when the connection breaks
        self._communicator.close()
        self._carrier.close(has_failed=has_failed)

    @contextmanager
    def _explained(self, deadline: Deadline, what: str) -> Iterator[tuple[Deadline, str]]:
        """The deadline and the name of a phase; an error in it gets the reason that a lost peer gave."""
        what = f"rank {self.rank} of {self.world_size}, {what}"
        try:
            yield deadline.watching(self._loss), what
        except TransferTimeoutError:
            raise
        except TransferError as error:
            reason = self._last_words()
            if reason is None or reason in str(error):
                raise
            raise TransferError(f"{what}: {reason}") from error

    def _loss(self) -> str | None:
        return next(filter(None, (peer_connection.loss() for peer_connection in self._peers)), None)

    def _last_words(self) -> str | None:
        end = time.monotonic() + _LAST_WORDS_S
        while (loss := self._loss()) is None and time.monotonic() < end:
            time.sleep(0.005)
        return loss


def host_group(hub: PeerHub, rendezvous: Rendezvous, *, device: torch.device, deadline: Deadline) -> Group:
    """Rank 0's side: wait for everyone, then connect. Raises: TransferError, TransferTimeoutError."""
    world_size = rendezvous.world_size
    what = f"rank 0 of {world_size}, connecting"
    peers = hub.gather(world_size, deadline=deadline)
    watched = deadline.watching(lambda: next(filter(None, (peer_connection.loss() for peer_connection in peers)), None))

    def connect() -> Communicator:
        def go(store: int | str = 0) -> None:
            for peer_connection in peers:
                peer_connection.tell({"go": store})

        if rendezvous.backend == "nccl":
            go()
            return _nccl(rendezvous, rank=0, device=device)
        if rendezvous.backend == "file":
            communicator = _files(rendezvous, rank=0)
            go()
            return communicator
        from coati_rl.transport.gloo import GlooCommunicator, close_store, open_store

        store, place = open_store(rendezvous.host)
        go(place)
        at_end = partial(close_store, place)
        return GlooCommunicator(
            store, rank=0, world_size=world_size, host=rendezvous.host, deadline=watched, at_end=at_end
        )

    communicator = watched.run(connect, what=what, discard=_close)
    return _group(communicator, peers, rendezvous, rank=0, device=device)


def join_group(rendezvous: Rendezvous, *, rank: int, device: torch.device, deadline: Deadline) -> Group:
    """A member's side. Raises: TransferError, TransferTimeoutError."""
    host, world_size = rendezvous.host, rendezvous.world_size
    who = f"rank {rank} of {world_size}"
    peer_connection, place = join_hub(
        host, rendezvous.port, rank=rank, secret=rendezvous.secret, what=f"{who}, joining", deadline=deadline
    )
    watched = deadline.watching(peer_connection.loss)

    def connect() -> Communicator:
        if rendezvous.backend == "nccl":
            return _nccl(rendezvous, rank=rank, device=device)
        if rendezvous.backend == "file":
            return _files(rendezvous, rank=rank)
        from coati_rl.transport.gloo import GlooCommunicator, connect_store

        store = connect_store(host, place)
        return GlooCommunicator(store, rank=rank, world_size=world_size, host=host, deadline=watched)

    try:
        communicator = watched.run(connect, what=f"{who}, connecting", discard=_close)
        return _group(communicator, [peer_connection], rendezvous, rank=rank, device=device)
    except TransferError as error:
        peer_connection.close(str(error))
        raise


def _nccl(rendezvous: Rendezvous, *, rank: int, device: torch.device) -> Communicator:
    from coati_rl.transport.nccl import CupyNcclCommunicator

    return CupyNcclCommunicator(
        unique_id=rendezvous.unique_id or "", rank=rank, world_size=rendezvous.world_size, device=device
    )


def _files(rendezvous: Rendezvous, *, rank: int) -> Communicator:
    return FileCommunicator(Path(rendezvous.directory or ""), rank=rank, world_size=rendezvous.world_size)


def _close(communicator: Communicator) -> None:
    communicator.close()


def _group(
    communicator: Communicator,
    peers: Sequence[PeerConnection],
    rendezvous: Rendezvous,
    *,
    rank: int,
    device: torch.device,
) -> Group:
    return Group(
        communicator,
        _carrier(communicator, rendezvous, rank=rank, device=device),
        peers,
        rank=rank,
        world_size=rendezvous.world_size,
        device=device if rendezvous.backend == "nccl" else torch.device("cpu"),
    )


def _carrier(communicator: Communicator, rendezvous: Rendezvous, *, rank: int, device: torch.device) -> Carrier:
    """Beside nccl and file, gloo connects the members, and says when something is there that goes another way."""
    make_segment: Callable[[str, int], Segment]
    match rendezvous.backend:
        case "gloo" | "nccl":
            return CollectiveCarrier(communicator)
        case "file":
            return FileCarrier(Path(rendezvous.directory or ""), rank=rank)
        case "shm":
            make_segment = partial(ShmSegment, rendezvous.unique_id or "")
        case "ipc":
            from coati_rl.transport.ipc import IpcSegment

            make_segment = partial(IpcSegment, device)
    return SegmentCarrier(communicator, make_segment, rank=rank, world_size=rendezvous.world_size)
