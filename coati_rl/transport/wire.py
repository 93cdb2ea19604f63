"""Send weights from trainers and receive them on engine ranks.

A group's first ranks are its senders, one for each pipeline stage of the trainers; each sends the tensors of its stage,
and takes part in the transfers of the others. `stream` defines the wire format, `bucket_transport` the interface of
transports.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.files import new_group_directory
from coati_rl.transport.group import Group, host_group, join_group
from coati_rl.transport.manifest import WeightManifest
from coati_rl.transport.peer_connection import PeerHub
from coati_rl.transport.rendezvous import CUDA_BACKENDS, CollectiveBackend, Rendezvous
from coati_rl.transport.sender_buckets import SenderBuckets
from coati_rl.transport.staging_memory import StagingMemory
from coati_rl.transport.stream import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """Hold a received update, read-only, until the next one is staged (see `BucketTransport`)."""

    policy_version: int
    tensors: tuple[tuple[str, torch.Tensor], ...]  # in manifest order
    digest: str  # hexadecimal; empty on a rank for which another one received


class WeightSender:
    """Send one sender's part of the updates: rank 0 opens groups, the other senders join them.

    `open` invites a set of engines; `send` may then be repeated as long as the set stays the same. A failed transfer
    closes the group, since neither gloo nor NCCL can continue after a timeout; the next one needs a new `open`, and
    a new `join` of the other senders.
    """

    def __init__(
        self,
        *,
        backend: CollectiveBackend = "gloo",
        host: str = "127.0.0.1",
        device: torch.device | None = None,
        directory: Path | None = None,
        stages_on_gpu: bool = True,
        sends_deltas: bool = False,
    ) -> None:
        """Choose the backend; `choose_backend` tells which one works where.

        Args:
            host: this process's address as engines reach it; the only one it listens on.
            device: the GPU of nccl and ipc.
            directory: for the file backend, on rank 0: on a disk that all members share, used by this run alone.
            stages_on_gpu: over nccl each rank of an engine receives and stages on its GPU; else one does for all.
            sends_deltas: with files: an update is what differs from the group's last one.
        """
        # With shm and ipc each rank maps the senders' memory, where the update is once for all.
        self._has_one_receiver = backend in ("gloo", "file") or (backend == "nccl" and not stages_on_gpu)
        self._backend = backend
        self._host = host
        self._device = (device or torch.device("cuda")) if backend in CUDA_BACKENDS else torch.device("cpu")
        self._directory = directory
        self._sends_deltas = sends_deltas
        self._num_senders = 1  # of the open group; valid on rank 0
        self._own: Rendezvous | None = None  # of the open group, if any
        self._hub: PeerHub | None = None  # rank 0 only
        self._group: Group | None = None
        self._cancelled = threading.Event()

    @property
    def is_open(self) -> bool:
        """Return True when `send` has a group to send to."""
        return self._own is not None

    @property
    def sender_invitations(self) -> tuple[Rendezvous, ...]:
        """Return what senders 1 to num_senders - 1 need for `join`, in this order; on rank 0 only."""
        if self._own is None:
            return ()
        return tuple(replace(self._own, first_rank=rank) for rank in range(1, self._num_senders))

    def open(self, world_sizes: Sequence[int], *, num_senders: int = 1) -> list[Rendezvous]:
        """Invite engines with these numbers of ranks, in a new group; closes the old one. Does not wait.

        Of an engine one rank or all of them join, see `Rendezvous.has_one_receiver`.

        Returns: the engines' invitations; see `sender_invitations` for those of the senders.
        """
        if not world_sizes or min(world_sizes) < 1:
            raise ValueError(f"world_sizes {list(world_sizes)}: need at least one engine, each with at least one rank")
        if num_senders < 1:
            raise ValueError(f"num_senders {num_senders}: rank 0 is one already")
        if self._backend == "file" and self._directory is None:
            raise ValueError("the file backend needs a directory")
        self.close()
        self._cancelled = threading.Event()
        unique_id = directory = None
        if self._backend == "nccl":
            from coati_rl.transport.nccl import create_unique_id

            unique_id = create_unique_id()
        elif self._backend == "shm":
            unique_id = token_hex(16)
        elif self._backend == "file" and self._directory is not None:
            directory = str(new_group_directory(self._directory))
        secret = token_hex(16)
        self._hub = PeerHub(self._host, secret=secret)
        members = [1 if self._has_one_receiver else world_size for world_size in world_sizes]
        invitations, first_rank = [], num_senders
        for num_members in members:
            invitations.append(
                Rendezvous(
                    backend=self._backend,
                    secret=secret,
                    host=self._host,
                    port=self._hub.port,
                    unique_id=unique_id,
                    directory=directory,
                    world_size=num_senders + sum(members),
                    first_rank=first_rank,
                    has_one_receiver=self._has_one_receiver,
                    sends_deltas=self._sends_deltas,
                )
            )
            first_rank += num_members
        self._own, self._num_senders = invitations[0], num_senders
        return invitations

    def join(self, invitation: Rendezvous) -> None:
        """Become sender `invitation.first_rank` of a new group of rank 0; leaves the old one. Does not wait."""
        self.close()
        self._cancelled = threading.Event()
        self._own = invitation

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]], *, timeout_s: float) -> str:
        """Take part in an update; the first call connects the group.

        Args:
            tensors: those that `manifest` announces for this sender, in its order.
        Returns: the digest of all senders' tensors.
        Raises: TransferError, TransferTimeoutError. All members then fail too, and nothing is committed anywhere.
        """
        own = self._own
        if own is None:
            raise TransferError("no open group: first call open() with the engines' world sizes, or join()")
        deadline = Deadline(timeout_s, cancelled=self._cancelled)
        try:
            if self._group is None and self._hub is not None:
                self._group = host_group(self._hub, own, device=self._device, deadline=deadline)
            elif self._group is None:
                self._group = join_group(own, rank=own.first_rank, device=self._device, deadline=deadline)
            if self._hub is not None and manifest.num_senders > self._num_senders:
                raise TransferError(f"manifest: {manifest.num_senders} senders, the group has {self._num_senders}")
            buckets = SenderBuckets(tensors, manifest, sender=self._group.rank)
            return Stream(self._group, manifest, buckets, deadline=deadline).run()
        except BaseException as error:
            reason = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            self._close(reason)  # the others fail at once, with the same reason
            raise

    def cancel(self) -> None:
        """End a `send` in another thread with a TransferError, for instance when a receiver has died."""
        self._cancelled.set()

    def close(self) -> None:
        """Leave the group, if any."""
        self._close(None)

    def _close(self, reason: str | None) -> None:
        if self._hub is not None:
            self._hub.close(reason)
        if self._group is not None:
            self._group.close(reason)
        self._group = self._hub = self._own = None


def receive(group: Group, manifest: WeightManifest, *, memory: StagingMemory, deadline: Deadline) -> StagedWeights:
    """Receive what `manifest` announces on an engine rank, into `memory` unless members share the senders' memory.

    Raises: TransferError, TransferTimeoutError; the group is unusable afterwards, and so is the memory's content.
    """
    stream = Stream(group, manifest, None, memory=memory, deadline=deadline)
    digest = stream.run()
    return StagedWeights(policy_version=manifest.policy_version, tensors=stream.tensors, digest=digest)


def map_received(manifest: WeightManifest, *, memory: StagingMemory, deadline: Deadline) -> StagedWeights:
    """Map what another rank of the engine receives into the same memory; complete when that rank has its digest."""
    what = f"preparing for version {manifest.policy_version}"
    received = memory.reserve(manifest.num_staged_bytes, deadline=deadline, what=what)
    return StagedWeights(policy_version=manifest.policy_version, tensors=manifest.tensors(received), digest="")
