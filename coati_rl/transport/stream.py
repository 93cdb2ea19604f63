"""The buckets of an update as they pass a member, and the digest of what has passed; the same for both ends.

On the wire: the buckets of the manifest, then one of 16 digest bytes from every member, which all compare with their
own. The digest is xxh3-128 over all tensors' bytes in manifest order without padding, so that it depends neither on the
bucket size nor on how many send or receive. A transfer thus ends well for one member only if all have the same bytes.
While a bucket is on its way, its sender packs the next one, and the others digest the one before; engine ranks also
refuse NaN and infinity, each in what it has itself received.
"""

from typing import Protocol

import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport import checksum as passes
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.group import Group
from coati_rl.transport.manifest import Bucket, WeightManifest


class Packer(Protocol):
    """A sender's `SenderBuckets`."""

    def fill(self, bucket: Bucket, buffer: torch.Tensor, hasher: "xxhash.xxh3_128") -> None:
        """Pack the bucket and digest what went into it."""


class Stream:
    """One member's passage through one update."""

    def __init__(
        self,
        group: Group,
        manifest: WeightManifest,
        packer: Packer | None,
        *,
        device: torch.device,
        deadline: Deadline,
    ) -> None:
        """`packer`: None if this member is an engine's rank, which stages the update."""
        self._group = group
        self._packer = packer
        self._version = manifest.policy_version
        self._buckets = manifest.buckets()
        self._device = device
        self._deadline = deadline
        self._hasher = xxhash.xxh3_128()
        self._num_finished = 0
        self.buffers: list[torch.Tensor] = []  # uint8[N] of each bucket; what an engine's rank stages

    def run(self) -> str:
        """Pass all buckets. Returns: the digest, hexadecimal.

        Raises: TransferError, TransferTimeoutError.
        """
        packer = self._packer
        self._group.begin(
            self._buckets,
            device=self._device,
            is_staging=packer is None,
            deadline=self._deadline,
            what=f"preparing for version {self._version}",
        )
        for index, bucket in enumerate(self._buckets):
            if packer is not None and bucket.sender == self._group.rank:
                if index and self._buckets[index - 1].sender != bucket.sender:
                    self._finish(index)  # what others sent before comes before it in the digest
                packer.fill(bucket, self._group.buffer(index), self._hasher)
            self._group.start(index, deadline=self._deadline, what=self._what(index))
            self._finish(index)
        self._finish(len(self._buckets))
        if packer is None:
            self.buffers = [self._group.buffer(index) for index in range(len(self._buckets))]
        digest = self._compare_digests()
        self._group.end()
        return digest

    def _finish(self, end: int) -> None:
        """Buckets before `end`."""
        for index in range(self._num_finished, end):
            bucket = self._buckets[index]
            self._group.finish(index, deadline=self._deadline, what=self._what(index))
            if bucket.sender != self._group.rank:
                buffer = self._group.buffer(index)
                for item in bucket.items:
                    flat = item.view(buffer).view(-1)
                    if self._packer is None:
                        passes.digest_and_check(flat, self._hasher, name=item.entry.name)
                    else:
                        passes.digest(flat, self._hasher)
        self._num_finished = max(self._num_finished, end)

    def _compare_digests(self) -> str:
        own = self._hasher.digest()
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
                    f"digest {own.hex()} of the bytes here, of those on rank {rank} it is {theirs.hex()}"
                )
        return own.hex()

    def _what(self, index: int) -> str:
        bucket = self._buckets[index]
        what = f"bucket {index + 1} of {len(self._buckets)} of version {self._version}"
        return self._phase(bucket.sender, f"{what} (first tensor: {bucket.items[0].entry.name!r})")

    def _phase(self, sender: int, what: str) -> str:
        return f"sending {what}" if sender == self._group.rank else f"receiving {what} from rank {sender}"
