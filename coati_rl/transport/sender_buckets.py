"""Prepare what one sender has to send: each tensor compared with the manifest, packed and digested as it is taken.

In: the sender's named tensors. Out: filled buckets, and the digest brought up to date.
"""

from collections.abc import Iterable

import torch
import xxhash

from coati_rl.errors import TransferError
from coati_rl.transport.checksum import pack
from coati_rl.transport.manifest import Bucket, TensorEntry, WeightManifest, dtype_name


class SenderBuckets:
    """The tensors of one sender, in manifest order."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, *, sender: int) -> None:
        self._source = iter(tensors)
        self._version = manifest.policy_version
        self._num_left = sum(entry.sender == sender for entry in manifest.entries)
        if not self._num_left:
            self._check_end()

    def fill(self, bucket: Bucket, buffer: torch.Tensor, hasher: "xxhash.xxh3_128") -> None:
        """Copy the next tensors to their places in `buffer`. Raises: TransferError if they are not the bucket's."""
        for item in bucket.items:
            tensor = self._next_tensor(item.entry).to(buffer.device).contiguous()
            pack(tensor.view(-1), item.view(buffer).view(-1), hasher)
        self._num_left -= len(bucket.items)
        if not self._num_left:
            self._check_end()  # before the last bucket is sent, so that nobody stages the update

    def _next_tensor(self, entry: TensorEntry) -> torch.Tensor:
        """The next tensor, if it is the announced one."""
        found = next(self._source, None)
        if found is None:
            raise TransferError(f"tensor {entry.name!r} of the manifest is missing: there are no more tensors")
        name, tensor = found[0], found[1].detach()
        actual = TensorEntry(name=name, dtype=dtype_name(tensor.dtype), shape=tuple(tensor.shape), sender=entry.sender)
        if actual != entry:
            raise TransferError(f"the manifest announces {entry}, next comes {actual}")
        return tensor

    def _check_end(self) -> None:
        surplus = next(self._source, None)
        if surplus is not None:
            raise TransferError(f"version {self._version}: tensor {surplus[0]!r} is not in the manifest")
