"""Transfer the buckets of an update and compute their digest, on senders and receivers alike.

Wire format: the buckets of the manifest, then 16 digest bytes from every member, which all compare with their own. A
digest is of all tensors' bytes in manifest order without padding, so that it does not depend on the number of senders
or receivers; on the host (xxh3-128) not on the size of buckets either, see `device_digest` for the one of GPUs. A
transfer succeeds for one member only if all have the same bytes.
While a bucket is being sent, its sender packs the next one, and the others digest the one before; engine ranks also
refuse NaN and infinity, each in what it has received.
"""

from typing import Protocol

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.checksum import Digest
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import Group
from coati_rl.transport.manifest import Bucket, WeightManifest, staged_tensors
from coati_rl.transport.staging_memory import StagingMemory


class Packer(Protocol):
    """Fill buckets on a sender; see `SenderBuckets`."""

    def fill(self, bucket: Bucket, buffer: torch.Tensor, digest: Digest) -> None:
        """Pack the bucket and digest its content."""


class Stream:
    """Run one member's part of one update."""

    def __init__(
        self,
        group: Group,
        manifest: WeightManifest,
        packer: Packer | None,
        *,
        memory: StagingMemory | None = None,
        deadline: Deadline,
    ) -> None:
        """Prepare an update; `packer` is None on an engine's rank, which stages it in `memory`."""
        self._group = group
        self._packer = packer
        self._version = manifest.policy_version
        self._buckets = manifest.buckets()
        self._memory = memory
        self._deadline = deadline
        self._digest = group.new_digest()
        self._num_finished = 0
        self.tensors: tuple[tuple[str, torch.Tensor], ...] = ()  # staged by an engine's rank, in manifest order

    def run(self) -> str:
        """Transfer all buckets. Returns: the digest, hexadecimal.

        Raises: TransferError, TransferTimeoutError.
        """
        packer = self._packer
        self._group.begin(
            self._buckets,
            memory=self._memory,
            deadline=self._deadline,
            what=f"preparing for version {self._version}",
        )
        for index, bucket in enumerate(self._buckets):
            if packer is not None and bucket.sender == self._group.rank:
                if index and self._buckets[index - 1].sender != bucket.sender:
                    self._finish(index)  # buckets that others sent before precede it in the digest
                packer.fill(bucket, self._group.buffer(index), self._digest)
            self._group.start(index, deadline=self._deadline, what=self._what(index))
            self._finish(index)
        self._finish(len(self._buckets))
        if packer is None:
            self.tensors = staged_tensors(self._buckets, self._group.buffer)
        digest = self._compare_digests()
        self._group.end()
        return digest

    def _finish(self, end: int) -> None:
        """Wait for the buckets before `end`, and digest those received."""
        for index in range(self._num_finished, end):
            bucket = self._buckets[index]
            self._group.finish(index, deadline=self._deadline, what=self._what(index))
            if bucket.sender != self._group.rank:
                buffer, arrived = self._group.buffer(index), self._group.arrived(index)
                for item in bucket.items:
                    flat = item.flat(buffer)
                    if self._packer is None:
                        self._digest.add_received(flat, arrived=item.flat(arrived), name=item.entry.name)
                    else:
                        self._digest.add(flat)
        self._num_finished = max(self._num_finished, end)

    def _compare_digests(self) -> str:
        own = self._digest.bytes()
        for rank in range(self._group.world_size):
            trailer = torch.tensor(list(own), dtype=torch.uint8, device=self._group.device)
            what = f"the digest of version {self._version}"
            if rank != self._group.rank:
                trailer.zero_()
            self._group.broadcast(trailer, root=rank, deadline=self._deadline, what=self._phase(rank, what))
            theirs = bytes(trailer.tolist())
            if theirs != own:
                raise TransferError(
                    f"rank {self._group.rank} of {self._group.world_size}, version {self._version}: "
                    f"the digest of the bytes here is {own.hex()}, that of the bytes on rank {rank} is {theirs.hex()}"
                )
        return own.hex()

    def _what(self, index: int) -> str:
        bucket = self._buckets[index]
        what = f"bucket {index + 1} of {len(self._buckets)} of version {self._version}"
        return self._phase(bucket.sender, f"{what} (first tensor: {bucket.items[0].entry.name!r})")

    def _phase(self, sender: int, what: str) -> str:
        return f"sending {what}" if sender == self._group.rank else f"receiving {what} from rank {sender}"
