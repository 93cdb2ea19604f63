"""Both halves of the weight wire. Trainer, rank 0: tensors in, digest out. Engine ranks: staged tensors and digest out.

On the wire: one broadcast for each bucket of the manifest, then one of the 16 digest bytes, which each receiver
compares with its own. The digest is xxh3-128 over all tensors' bytes in manifest order without padding, so that it
depends neither on the bucket size nor on the number of receivers.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import Group, host_group
from coati_rl.transport.lifeline import LifelineHub
from coati_rl.transport.manifest import DTYPES, Bucket, TensorEntry, WeightManifest, dtype_name
from coati_rl.transport.rendezvous import CollectiveBackend, Rendezvous

_DIGEST_BYTES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedWeights:
    """A received update, in memory of its own that nothing else writes to."""

    policy_version: int
    tensors: tuple[tuple[str, torch.Tensor], ...]  # in manifest order
    digest: str  # hexadecimal


class WeightSender:
    """The trainer's half: opens groups and sends updates as their rank 0.

    `open` invites a set of engines; `send` may then be repeated as long as the set stays the same. A transfer that
    fails closes the group, since neither gloo nor NCCL can go on after a timeout; the next one needs a new `open`.
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
        self._own: Rendezvous | None = None  # of the open group, if any
        self._hub: LifelineHub | None = None
        self._group: Group | None = None
        self._cancelled = threading.Event()

    @property
    def is_open(self) -> bool:
        """True when `send` has a group to send to."""
        return self._own is not None

    def open(self, world_sizes: Sequence[int]) -> list[Rendezvous]:
        """Invite engines with these numbers of ranks, in a new group; closes the old one. Does not wait for anyone."""
        if not world_sizes or min(world_sizes) < 1:
            raise ValueError(f"world_sizes {list(world_sizes)}: need at least one engine, each with at least one rank")
        self.close()
        self._cancelled = threading.Event()
        unique_id = None
        if self._backend == "nccl":
            from coati_rl.transport.nccl import create_unique_id

            unique_id = create_unique_id()
        self._epoch += 1
        self._hub = LifelineHub(self._host, epoch=self._epoch)
        invitations, first_rank = [], 1
        for world_size in world_sizes:
            invitations.append(
                Rendezvous(
                    backend=self._backend,
                    epoch=self._epoch,
                    host=self._host,
                    port=self._hub.port,
                    unique_id=unique_id,
                    world_size=1 + sum(world_sizes),
                    first_rank=first_rank,
                )
            )
            first_rank += world_size
        self._own = invitations[0]
        return invitations

    def send(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]], *, timeout_s: float) -> str:
        """Broadcast `tensors`, which must be what `manifest` announces, in its order; the first call joins the group.

        Returns: the digest.
        Raises: TransferError, TransferTimeoutError. Receivers fail too then, and nothing is committed anywhere.
        """
        own, hub = self._own, self._hub
        if own is None or hub is None:
            raise TransferError("no open group: call open() with the engines' world sizes first")
        deadline = Deadline(timeout_s, cancelled=self._cancelled)
        try:
            if self._group is None:
                self._group = host_group(hub, own, device=self._device, deadline=deadline)
            return _broadcast_all(self._group, manifest, tensors, device=self._device, deadline=deadline)
        except BaseException as error:
            reason = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            self._close(reason)  # the receivers fail at once, with the same reason
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
    hasher = xxhash.xxh3_128()
    tensors: list[tuple[str, torch.Tensor]] = []
    buckets = manifest.buckets()
    for index, bucket in enumerate(buckets):
        # Fresh for every bucket: the staged tensors are views of it, and a layerwise reload keeps references to them.
        buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=device)
        what = f"receiving {_describe(bucket, index, len(buckets), manifest)}"
        group.broadcast(buffer, deadline=deadline, what=what)
        _update_digest(hasher, bucket, buffer)
        for item in bucket.items:
            flat = buffer[item.offset : item.offset + item.entry.num_bytes].view(DTYPES[item.entry.dtype])
            tensors.append((item.entry.name, flat.view(item.entry.shape)))
    trailer = torch.empty(_DIGEST_BYTES, dtype=torch.uint8, device=device)
    group.broadcast(trailer, deadline=deadline, what=f"receiving the digest of version {manifest.policy_version}")
    sent, received = bytes(trailer.tolist()).hex(), hasher.hexdigest()
    if sent != received:
        raise TransferError(
            f"rank {group.rank} of {group.world_size}, version {manifest.policy_version}: "
            f"digest {received} of the received bytes, the sender's is {sent}"
        )
    return StagedWeights(policy_version=manifest.policy_version, tensors=tuple(tensors), digest=received)


def _broadcast_all(
    group: Group,
    manifest: WeightManifest,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    device: torch.device,
    deadline: Deadline,
) -> str:
    hasher = xxhash.xxh3_128()
    source = iter(tensors)
    buckets = manifest.buckets()
    # One buffer for all buckets, zeroed once so that padding is not someone else's memory.
    buffer = torch.zeros(max(bucket.num_bytes for bucket in buckets), dtype=torch.uint8, device=device)
    for index, bucket in enumerate(buckets):
        filled = buffer[: bucket.num_bytes]
        for item in bucket.items:
            tensor = _next_tensor(source, item.entry)
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            filled[item.offset : item.offset + item.entry.num_bytes].copy_(raw)
        _update_digest(hasher, bucket, filled)
        what = f"sending {_describe(bucket, index, len(buckets), manifest)}"
        group.broadcast(filled, deadline=deadline, what=what)
    surplus = next(source, None)
    if surplus is not None:
        raise TransferError(f"version {manifest.policy_version}: tensor {surplus[0]!r} is not in the manifest")
    trailer = torch.tensor(list(hasher.digest()), dtype=torch.uint8, device=device)
    group.broadcast(trailer, deadline=deadline, what=f"sending the digest of version {manifest.policy_version}")
    return hasher.hexdigest()


def _next_tensor(source: Iterator[tuple[str, torch.Tensor]], entry: TensorEntry) -> torch.Tensor:
    """The next tensor, if it is the announced one and finite."""
    found = next(source, None)
    if found is None:
        raise TransferError(f"tensor {entry.name!r} of the manifest is missing: there are no more tensors")
    name, tensor = found
    actual = TensorEntry(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape))
    if actual != entry:
        raise TransferError(f"the manifest announces {entry}, next comes {actual}")
    # NaN spreads into both extremes and infinities are extremes: 50 times faster than isfinite().all() on bfloat16.
    low, high = torch.aminmax(tensor.detach())
    if not (low.isfinite() and high.isfinite()):
        raise TransferError(f"tensor {name!r} holds NaN or infinity; nothing was committed")
    return tensor


def _update_digest(hasher: "xxhash.xxh3_128", bucket: Bucket, buffer: torch.Tensor) -> None:
    raw = buffer.cpu().numpy().data  # no copy for CPU tensors
    for item in bucket.items:
        hasher.update(raw[item.offset : item.offset + item.entry.num_bytes])


def _describe(bucket: Bucket, index: int, num_buckets: int, manifest: WeightManifest) -> str:
    first = bucket.items[0].entry.name
    return f"bucket {index + 1} of {num_buckets} of version {manifest.policy_version} (from tensor {first!r})"
