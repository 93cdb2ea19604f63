"""Keep a copy of an update in host memory, and exchange it bucket by bucket as what differs from the last one.

The run's end encodes, the producer's end applies; each knows by its digest which update the other one holds. A copy
that is being changed, or whose digest is not the announced one, has no digest: the next update is whole.
"""

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from coati_rl.errors import TransferError
from coati_rl.transport import delta
from coati_rl.transport.checksum import HostDigest
from coati_rl.transport.manifest import WeightManifest


class WeightCopy:
    """Hold the buckets of one update, one after the other."""

    def __init__(self, manifest: WeightManifest) -> None:
        """Take memory for the tensors of `manifest`, whichever rank sends them."""
        entries = tuple(replace(entry, sender=0) for entry in manifest.entries)
        self.manifest = replace(manifest, entries=entries)
        self.buckets = self.manifest.buckets()
        self._begins = [0, *accumulate(bucket.num_bytes for bucket in self.buckets)]
        self._memory = torch.zeros(self._begins[-1], dtype=torch.uint8)
        self.digest = ""  # of an update that is here whole

    @property
    def tensors(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Return the tensors by name, views of the memory."""
        return self.manifest.tensors(self._memory)

    def bucket(self, index: int) -> np.ndarray:
        """Return uint8[N] of a bucket."""
        found: np.ndarray = self._memory[self._begins[index] : self._begins[index + 1]].numpy()
        return found

    def encode(self, index: int, base: "WeightCopy | None") -> bytes:
        """Return a bucket as its difference to that of `base`, or whole. Raises: TransferError if there is none."""
        if not 0 <= index < len(self.buckets):
            raise TransferError(f"version {self.manifest.policy_version} has no bucket {index}")
        return delta.encode(
            self.bucket(index), None if base is None else base.bucket(index), itemsize=self.buckets[index].itemsize
        )

    def apply(self, index: int, data: bytes, *, is_delta: bool) -> None:
        """Change a bucket into the one that was encoded. Raises: TransferError."""
        self.digest = ""
        delta.apply(data, self.bucket(index), is_delta=is_delta, itemsize=self.buckets[index].itemsize)

    def prove(self, digest: str) -> None:
        """Compare the digest of all tensors. Raises: TransferError if it is another one."""
        own = HostDigest()
        for _, tensor in self.tensors:
            own.add(tensor.view(-1))
        found = own.bytes().hex()
        if found != digest:
            raise TransferError(
                f"version {self.manifest.policy_version}: the digest of what arrived is {found}, not {digest}"
            )
        self.digest = digest

    def has_layout_of(self, manifest: WeightManifest) -> bool:
        """Return True if an update of this manifest fits into the same memory."""
        named = [(each.name, each.dtype, each.shape) for each in manifest.entries]
        own = [(each.name, each.dtype, each.shape) for each in self.manifest.entries]
        return named == own and manifest.bucket_bytes == self.manifest.bucket_bytes

    def rename(self, manifest: WeightManifest) -> None:
        """Take the version of another update of the same layout."""
        self.manifest = replace(manifest, entries=self.manifest.entries)

    def fill(self, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors of an update of the same layout."""
        self.digest = ""
        self.rename(manifest)
        for (_, own), (_, tensor) in zip(self.tensors, tensors, strict=True):
            own.copy_(tensor)
