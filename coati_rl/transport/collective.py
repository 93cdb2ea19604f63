"""Send buckets by broadcast over the communicator itself (gloo on CPU, NCCL on CUDA)."""

from collections.abc import Sequence

import torch

from coati_rl.transport.communicator import Communicator, Operation
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.manifest import Bucket
from coati_rl.transport.staging_memory import StagingMemory


class CollectiveTransport:
    """Implement `BucketTransport`. Memory: engine ranks twice the update (CUDA: once), senders two buckets."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._staging = StagingMemory()
        self._scratch: tuple[torch.Tensor, ...] = ()  # a sender's: one is packed while the other is sent
        self._buckets: Sequence[Bucket] = ()
        self._buffers: dict[int, torch.Tensor] = {}
        self._operations: dict[int, Operation] = {}

    def begin(
        self, buckets: Sequence[Bucket], *, device: torch.device, is_staging: bool, deadline: Deadline, what: str
    ) -> None:
        """See `BucketTransport.begin`."""
        self._buckets, self._device, self._is_staging = buckets, device, is_staging
        self._staging.begin()
        largest = max(bucket.num_bytes for bucket in buckets)
        if not is_staging and (not self._scratch or self._scratch[0].numel() < largest):
            self._scratch = tuple(torch.zeros(largest, dtype=torch.uint8, device=device) for _ in range(2))

    def buffer(self, index: int) -> torch.Tensor:
        """See `BucketTransport.buffer`."""
        num_bytes = self._buckets[index].num_bytes
        if not self._is_staging:
            return self._scratch[index % 2][:num_bytes]
        if index not in self._buffers:
            self._buffers[index] = self._staging.buffer(index, num_bytes, self._device)
        return self._buffers[index]

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `BucketTransport.start`."""
        self._operations[index] = self._communicator.start(
            self.buffer(index), root=self._buckets[index].sender, deadline=deadline, what=what
        )

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `BucketTransport.finish`."""
        self._operations.pop(index).wait(deadline=deadline, what=what)

    def end(self) -> None:
        """See `BucketTransport.end`."""
        self._buffers = {}
        if self._device.type == "cuda":
            self._scratch = ()  # the trainer needs it

    def close(self, *, has_failed: bool) -> None:
        """See `BucketTransport.close`."""
        self._buffers, self._operations, self._scratch = {}, {}, ()
