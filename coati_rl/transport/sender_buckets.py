"""Pack one sender's tensors into buckets, compare each with the manifest, and update the digest."""

from collections.abc import Iterable

import torch

from coati_rl.errors import TransferError
from coati_rl.transport.checksum import Digest, pack
from coati_rl.transport.manifest import Bucket, TensorEntry, WeightManifest, dtype_name


class SenderBuckets:
    """Fill buckets with the tensors of one sender, in manifest order."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]], manifest: WeightManifest, *, sender: int) -> None:
        self._source = iter(tensors)
        self._version = manifest.policy_version
        self._num_left = sum(entry.sender == sender for entry in manifest.entries)
        self._flat = torch.empty(0)  # the elements of the last tensor, of which parts may be left
        if not self._num_left:
            self._check_end()

    def fill(self, bucket: Bucket, buffer: torch.Tensor, digest: Digest) -> None:
        """Copy the next tensors, or the next part of a large one, to their offsets in `buffer`.

        Raises: TransferError if they are not the bucket's.
        """
        for item in bucket.items:
            if item.begin == 0:
                self._flat = torch.empty(0)  # freed before the next one is gathered
                self._flat = self._next_tensor(item.entry).to(buffer.device).contiguous().view(-1)
                self._num_left -= 1
            pack(item.part_of(self._flat), item.flat(buffer), digest)
        if not self._num_left:
            self._check_end()  # before the last bucket is sent, so that no member stages the update

    def _next_tensor(self, entry: TensorEntry) -> torch.Tensor:
        """Return the next tensor. Raises: TransferError if it is not the announced one."""
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
