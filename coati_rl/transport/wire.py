"""Both halves of the weight wire. Senders: tensors in, digest out. Engine ranks: staged tensors and digest out.

A group's first ranks are its senders, one for each pipeline stage of the trainers; each broadcasts the tensors of its
stage, and takes part in the broadcasts of the others. On the wire: one broadcast for each bucket of the manifest, then
one of 16 digest bytes from every sender, which all the others compare with their own. The digest is xxh3-128 over all
tensors' bytes in manifest order without padding, so that it depends neither on the bucket size nor on how many send or
receive. A transfer thus ends well for rank 0 only if all senders have seen the same bytes to the end.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import Group, host_group, join_group
from coati_rl.transport.lifeline import LifelineHub
from coati_rl.transport.manifest import DTYPES, Bucket, TensorEntry, WeightManifest, dtype_name
from coati_rl.transport.rendezvous import CollectiveBackend, Rendezvous


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """A received update, in memory of its own that nothing else writes to."""

    policy_version: int
    tensors: tuple[tuple[str, torch.Tensor], ...]  # in manifest order
    digest: str  # hexadecimal


class WeightSender:
    """One sender's half: rank 0 opens groups, the others join them, and each sends its share of the updates.

    `open` invites a set of engines; `send` may then be repeated as long as the set stays the same. A transfer that
    fails closes the group, since neither gloo nor NCCL can go on after a timeout; the next one needs a new `open`, and
    a new `join` of the other senders.
    """

    def __init__(
        self,
        *,
        backend: CollectiveBackend = "gloo",
        host: str = "127.0.0.1",
        device: torch.device | None = None,
    ) -> None:
        """`host`: this process's address as engines reach it; it alone is listened on. `device`: nccl's GPU."""
        self._backend = backend
        self._host = host
        self._device = device or torch.device("cpu" if backend == "gloo" else "cuda")
        self._epoch = 0
        self._num_senders = 1  # of the open group; rank 0 alone knows
        self._own: Rendezvous | None = None  # of the open group, if any
        self._hub: LifelineHub | None = None  # rank 0 only
        self._group: Group | None = None
        self._cancelled = threading.Event()

    @property
    def is_open(self) -> bool:
        """True when `send` has a group to send to."""
        return self._own is not None

    @property
    def sender_invitations(self) -> tuple[Rendezvous, ...]:
        """Rank 0 only: what senders 1 to num_senders - 1 need for `join`, in this order."""
        if self._own is None:
            return ()
        return tuple(replace(self._own, first_rank=rank) for rank in range(1, self._num_senders))

    def open(self, world_sizes: Sequence[int], *, num_senders: int = 1) -> list[Rendezvous]:
        """Invite engines with these numbers of ranks, in a new group; closes the old one. Does not wait for anyone.

        Returns: the engines' invitations; see `sender_invitations` for the others.
        """
        if not world_sizes or min(world_sizes) < 1:
            raise ValueError(f"world_sizes {list(world_sizes)}: need at least one engine, each with at least one rank")
        if num_senders < 1:
            raise ValueError(f"num_senders {num_senders}: rank 0 is one already")
        self.close()
        self._cancelled = threading.Event()
        unique_id = None
        if self._backend == "nccl":
            from coati_rl.transport.nccl import create_unique_id

            unique_id = create_unique_id()
        self._epoch += 1
        self._hub = LifelineHub(self._host, epoch=self._epoch)
        invitations, first_rank = [], num_senders
        for world_size in world_sizes:
            invitations.append(
                Rendezvous(
                    backend=self._backend,
                    epoch=self._epoch,
                    host=self._host,
                    port=self._hub.port,
                    unique_id=unique_id,
                    world_size=num_senders + sum(world_sizes),
                    first_rank=first_rank,
                )
            )
            first_rank += world_size
        self._own, self._num_senders = invitations[0], num_senders
        return invitations

    def join(self, invitation: Rendezvous) -> None:
        """Be sender `invitation.first_rank` of a new group of rank 0; leaves the old one. Does not wait for anyone."""
        self.close()
        self._cancelled = threading.Event()
        self._own = invitation

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]], *, timeout_s: float) -> str:
        """Take part in an update; the first call connects the group.

        Args:
            tensors: those that `manifest` announces for this sender, in its order.
        Returns: the digest of all senders' tensors.
        Raises: TransferError, TransferTimeoutError. All members fail too then, and nothing is committed anywhere.
        """
        own = self._own
        if own is None:
            raise TransferError("no open group: call open() with the engines' world sizes, or join(), first")
        deadline = Deadline(timeout_s, cancelled=self._cancelled)
        try:
            if self._group is None and self._hub is not None:
                self._group = host_group(self._hub, own, device=self._device, deadline=deadline)
            elif self._group is None:
                self._group = join_group(own, rank=own.first_rank, device=self._device, deadline=deadline)
            if self._hub is not None and manifest.num_senders > self._num_senders:
                raise TransferError(f"manifest: {manifest.num_senders} senders, the group has {self._num_senders}")
            return _send_share(self._group, manifest, tensors, device=self._device, deadline=deadline)
        except BaseException as error:
            reason = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            self._close(reason)  # the others fail at once, with the same reason
            raise

    def cancel(self) -> None:
        """End a `send` that runs in another thread with a TransferError, for instance when a receiver has died."""
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


def receive(
    group: Group,
    manifest: WeightManifest,
    *,
    device: torch.device,
    deadline: Deadline,
) -> StagedWeights:
    """The engine's half: receive what `manifest` announces into fresh memory on `device`.

    Raises: TransferError, TransferTimeoutError. The group is of no further use then.
    """
    stream = _Stream(group, manifest, device=device, deadline=deadline)
    tensors: list[tuple[str, torch.Tensor]] = []
    for bucket in manifest.buckets():
        # Fresh for every bucket: the staged tensors are views of it, and a layerwise reload keeps references to them.
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        stream.broadcast(bucket, buffer)
        for item in bucket.items:
            flat = buffer[item.offset : item.offset + item.entry.num_bytes].view(DTYPES[item.entry.dtype])
            tensors.append((item.entry.name, flat.view(item.entry.shape)))
    return StagedWeights(policy_version=manifest.policy_version, tensors=tuple(tensors), digest=stream.finish())


def _send_share(
    group: Group,
    manifest: WeightManifest,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    device: torch.device,
    deadline: Deadline,
) -> str:
    stream = _Stream(group, manifest, device=device, deadline=deadline)
    share = _Share(tensors, manifest, sender=group.rank)
    buckets = manifest.buckets()
    # One buffer for all buckets, zeroed once so that padding is not someone else's memory.
    buffer = torch.zeros(max(bucket.num_bytes for bucket in buckets), dtype=torch.uint8, device=device)
    for bucket in buckets:
        filled = buffer[: bucket.num_bytes]
        if bucket.sender == group.rank:
            share.fill(bucket, filled)
        stream.broadcast(bucket, filled)
    return stream.finish()


class _Stream:
    """The buckets in manifest order as they pass a member, and the digest of what has passed."""

    def __init__(self, group: Group, manifest: WeightManifest, *, device: torch.device, deadline: Deadline) -> None:
        self._group = group
        self._version = manifest.policy_version
        self._num_senders = manifest.num_senders
        self._num_buckets = len(manifest.buckets())
        self._device = device
        self._deadline = deadline
        self._hasher = xxhash.xxh3_128()
        self._num_passed = 0

    def broadcast(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """`buffer`, uint8[bucket.num_bytes], is sent by the bucket's sender and received by the others."""
        self._num_passed += 1
        what = f"bucket {self._num_passed} of {self._num_buckets} of version {self._version}"
        self._broadcast(buffer, bucket.sender, f"{what} (first tensor: {bucket.items[0].entry.name!r})")
        _update_digest(self._hasher, bucket, buffer)

    def finish(self) -> str:
        """Compare digests with every sender. Returns: the digest, in hexadecimal."""
        own = self._hasher.digest()
        for sender in range(self._num_senders):
            trailer = torch.tensor(list(own), dtype=torch.uint8, device=self._device)
            if sender != self._group.rank:
                trailer.zero_()
            self._broadcast(trailer, sender, f"the digest of version {self._version}")
            theirs = bytes(trailer.tolist())
            if theirs != own:
                raise TransferError(
                    f"rank {self._group.rank} of {self._group.world_size}, version {self._version}: "
                    f"digest {own.hex()} of the bytes here, of those on rank {sender} it is {theirs.hex()}"
                )
        return own.hex()

    def _broadcast(self, data: torch.Tensor, sender: int, what: str) -> None:
        what = f"sending {what}" if sender == self._group.rank else f"receiving {what} from rank {sender}"
        self._group.broadcast(data, root=sender, deadline=self._deadline, what=what)


class _Share:
    """The tensors of one sender, each compared with the manifest as it is taken."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, *, sender: int) -> None:
        self._source = iter(tensors)
        self._version = manifest.policy_version
        self._num_left = sum(entry.sender == sender for entry in manifest.entries)
        if not self._num_left:
            self._check_end()

    def fill(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Copy the next tensors to their places in `buffer`. Raises: TransferError if they are not the bucket's."""
        for item in bucket.items:
            raw = self._next_tensor(item.entry).contiguous().view(-1).view(torch.uint8)
            buffer[item.offset : item.offset + item.entry.num_bytes].copy_(raw)
        self._num_left -= len(bucket.items)
        if not self._num_left:
            self._check_end()  # before the last bucket is sent, so that nobody stages the update

    def _next_tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The next tensor, if it is the announced one and finite."""
        found = next(self._source, None)
        if found is None:
            raise TransferError(f"tensor {entry.name!r} of the manifest is missing: there are no more tensors")
        name, tensor = found[0], found[1].detach()
        actual = TensorEntry(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), sender=entry.sender)
        if actual != entry:
            raise TransferError(f"the manifest announces {entry}, next comes {actual}")
        # NaN spreads into both extremes and infinities are extremes: 50 times faster than isfinite().all() on bfloat16.
        low, high = torch.aminmax(tensor)
        if not (low.isfinite() and high.isfinite()):
            raise TransferError(f"tensor {name!r} holds NaN or infinity; nothing was committed")
        return tensor

    def _check_end(self) -> None:
        surplus = next(self._source, None)
        if surplus is not None:
            raise TransferError(f"version {self._version}: tensor {surplus[0]!r} is not in the manifest")


def _update_digest(hasher: "xxhash.xxh3_128", bucket: Bucket, buffer: torch.Tensor) -> None:
    raw = buffer.cpu().numpy().data  # no copy for CPU tensors
    for item in bucket.items:
        hasher.update(raw[item.offset : item.offset + item.entry.num_bytes])
