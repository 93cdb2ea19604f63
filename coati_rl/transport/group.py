"""Connect the senders and the engines' ranks by a communicator, and by peer connections that detect dead members.

Built from a hub (rank 0, the first sender) or a rendezvous (members). Its operations fail with the peer's own reason.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from coati_rl.errors import TransferError, TransferTimeoutError
from coati_rl.transport.bucket_transport import BucketTransport
from coati_rl.transport.checksum import Digest, HostDigest
from coati_rl.transport.collective import CollectiveTransport
from coati_rl.transport.communicator import Communicator, broadcast
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.device_digest import DeviceDigest
from coati_rl.transport.file_communicator import FileCommunicator
from coati_rl.transport.files import FileTransport
from coati_rl.transport.manifest import Bucket
from coati_rl.transport.peer_connection import PeerConnection, PeerHub, join_hub
from coati_rl.transport.rendezvous import CUDA_BACKENDS, Rendezvous
from coati_rl.transport.segments import Segment, SegmentTransport
from coati_rl.transport.shm import ShmSegment
from coati_rl.transport.staging_memory import StagingMemory

_REASON_WAIT_S = 0.5  # for a peer's reason to arrive, perhaps relayed by rank 0, after a connection broke


class Group:
    """Implement `BucketTransport` with errors that name rank, phase and cause; the senders are the first ranks."""

    def __init__(
        self,
        communicator: Communicator,
        transport: BucketTransport,
        peers: Sequence[PeerConnection],
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        digests_on_gpu: bool = False,
    ) -> None:
        """Wrap connected parts.

        Args:
            device: of the tensors that the communicator broadcasts.
            digests_on_gpu: every member has the updates' bytes on a GPU.
        """
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self._communicator = communicator
        self._transport = transport
        self._peers = peers
        self._digests_on_gpu = digests_on_gpu

    def new_digest(self) -> Digest:
        """Return a digest of nothing, of the kind that all members compute."""
        return DeviceDigest() if self._digests_on_gpu else HostDigest()

    def begin(self, buckets: Sequence[Bucket], *, memory: StagingMemory | None, deadline: Deadline, what: str) -> None:
        with self._explained(deadline, what) as (watched, named):
            self._transport.begin(buckets, memory=memory, deadline=watched, what=named)

    def buffer(self, index: int, count: int = 1) -> torch.Tensor:
        return self._transport.buffer(index, count)

    def arrived(self, index: int) -> torch.Tensor:
        return self._transport.arrived(index)

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `BucketTransport.start`; `what` is the phase and the bucket, the rank is added."""
        with self._explained(deadline, what) as (watched, named):
            self._transport.start(index, deadline=watched, what=named)

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        with self._explained(deadline, what) as (watched, named):
            self._transport.finish(index, deadline=watched, what=named)

    def broadcast(self, data: torch.Tensor, *, root: int, deadline: Deadline, what: str) -> None:
        """Broadcast a few bytes that belong to no bucket."""
        with self._explained(deadline, what) as (watched, named):
            broadcast(self._communicator, data, root=root, deadline=watched, what=named)

    def end(self) -> None:
        self._transport.end()

    def close(self, reason: str | None = None) -> None:
        """Leave the group; with a `reason`, the others' transfers fail with it."""
        has_failed = reason is not None or self._failure() is not None
        for peer_connection in self._peers:
            peer_connection.close(reason)  # first, so that the reason arrives before the connection breaks
        self._communicator.close()
        self._transport.close(has_failed=has_failed)

    @contextmanager
    def _explained(self, deadline: Deadline, what: str) -> Iterator[tuple[Deadline, str]]:
        """Yield the deadline and the phase's full name; an error in the block gets the reason that a lost peer sent."""
        what = f"rank {self.rank} of {self.world_size}, {what}"
        with _explained(self._peers, deadline, what) as watched:
            yield watched, what

    def _failure(self) -> str | None:
        return _first_failure(self._peers)


@contextmanager
def _explained(peers: Sequence[PeerConnection], deadline: Deadline, what: str) -> Iterator[Deadline]:
    """Yield the deadline that ends with a lost peer; an error in the block gets the reason that the peer sent."""
    try:
        yield deadline.watching(lambda: _first_failure(peers))
    except TransferTimeoutError:
        raise
    except TransferError as error:
        reason = _reason_of(peers)
        if reason is None or reason in str(error):
            raise
        raise TransferError(f"{what}: {reason}") from error


def _first_failure(peers: Sequence[PeerConnection]) -> str | None:
    return next(filter(None, (peer_connection.failure() for peer_connection in peers)), None)


def _reason_of(peers: Sequence[PeerConnection]) -> str | None:
    end = time.monotonic() + _REASON_WAIT_S
    while (reason := _first_failure(peers)) is None and time.monotonic() < end:
        time.sleep(0.005)
    return reason


def host_group(hub: PeerHub, rendezvous: Rendezvous, *, device: torch.device, deadline: Deadline) -> Group:
    """Wait for all members as rank 0, then connect. Raises: TransferError, TransferTimeoutError."""
    world_size = rendezvous.world_size
    what = f"rank 0 of {world_size}, connecting"
    peers = hub.gather(world_size, deadline=deadline)

    def connect(watched: Deadline) -> Communicator:
        def go(store: int | str = 0) -> None:
            for peer_connection in peers:
                peer_connection.send({"go": store})

        if rendezvous.backend == "nccl":
            go()
            return _nccl(rendezvous, rank=0, device=device)
        if rendezvous.backend == "file":
            communicator = _files(rendezvous, rank=0)
            go()
            return communicator
        from coati_rl.transport.gloo import GlooCommunicator, close_store, open_store

        store, address = open_store(rendezvous.host)
        go(address)
        at_end = partial(close_store, address)
        return GlooCommunicator(
            store, rank=0, world_size=world_size, host=rendezvous.host, deadline=watched, at_end=at_end
        )

    communicator = _connect(connect, peers, deadline=deadline, what=what)
    return _group(communicator, peers, rendezvous, rank=0, device=device)


def join_group(rendezvous: Rendezvous, *, rank: int, device: torch.device, deadline: Deadline) -> Group:
    """Connect as a member. Raises: TransferError, TransferTimeoutError."""
    host, world_size = rendezvous.host, rendezvous.world_size
    who = f"rank {rank} of {world_size}"
    peer_connection, store_address = join_hub(
        host, rendezvous.port, rank=rank, secret=rendezvous.secret, what=f"{who}, joining", deadline=deadline
    )

    def connect(watched: Deadline) -> Communicator:
        if rendezvous.backend == "nccl":
            return _nccl(rendezvous, rank=rank, device=device)
        if rendezvous.backend == "file":
            return _files(rendezvous, rank=rank)
        from coati_rl.transport.gloo import GlooCommunicator, connect_store

        store = connect_store(host, store_address)
        return GlooCommunicator(store, rank=rank, world_size=world_size, host=host, deadline=watched)

    try:
        communicator = _connect(connect, [peer_connection], deadline=deadline, what=f"{who}, connecting")
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


def _connect(
    connect: Callable[[Deadline], Communicator], peers: Sequence[PeerConnection], *, deadline: Deadline, what: str
) -> Communicator:
    """Connect within the deadline; a member that is connected already may give up, and says why."""
    with _explained(peers, deadline, what) as watched:
        return watched.run(lambda: connect(watched), what=what, discard=lambda communicator: communicator.close())


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
        _make_transport(communicator, rendezvous, rank=rank, device=device),
        peers,
        rank=rank,
        world_size=rendezvous.world_size,
        device=device if rendezvous.backend == "nccl" else torch.device("cpu"),
        digests_on_gpu=rendezvous.backend in CUDA_BACKENDS and not rendezvous.has_one_receiver,
    )


def _make_transport(
    communicator: Communicator, rendezvous: Rendezvous, *, rank: int, device: torch.device
) -> BucketTransport:
    """Make the transport of the backend; shm and ipc announce over gloo what is in a segment."""
    make_segment: Callable[[str, int], Segment]
    match rendezvous.backend:
        case "gloo":
            return CollectiveTransport(communicator, device=torch.device("cpu"))
        case "nccl":
            # One receiver stages in host memory what arrives on its GPU; senders have no staging memory.
            return CollectiveTransport(communicator, device=device, is_copied=rendezvous.has_one_receiver)
        case "file":
            return FileTransport(Path(rendezvous.directory or ""), rank=rank, sends_deltas=rendezvous.sends_deltas)
        case "shm":
            make_segment = partial(ShmSegment, rendezvous.unique_id or "")
        case "ipc":
            from coati_rl.transport.ipc import IpcSegment

            make_segment = partial(IpcSegment, device)
    return SegmentTransport(communicator, make_segment, rank=rank, world_size=rendezvous.world_size)
