"""Send buckets by broadcast over the communicator itself (gloo on CPU, NCCL on CUDA)."""

from collections.abc import Sequence
from itertools import accumulate

import torch

from coati_rl.transport.communicator import Communicator, Operation
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.manifest import Bucket
from coati_rl.transport.staging_memory import StagingMemory


class CollectiveTransport:
    """Implement `BucketTransport`. Memory: engine ranks the update, where they stage it; two buckets on `device`."""

    def __init__(self, communicator: Communicator, *, device: torch.device, is_copied: bool = False) -> None:
        """Take the device whose tensors the communicator broadcasts.

        With `is_copied`, what arrives there is staged in other memory, and copied bucket by bucket.
        """
        self._communicator = communicator
        self._device = device
        self._is_copied = is_copied
        self._scratch: tuple[torch.Tensor, ...] = ()  # a sender's: one is packed while the other is sent
        self._buckets: Sequence[Bucket] = ()
        self._begins: list[int] = []  # of buckets in the staging memory
        self._staged: torch.Tensor | None = None
        self._operations: dict[int, Operation] = {}

    def begin(self, buckets: Sequence[Bucket], *, memory: StagingMemory | None, deadline: Deadline, what: str) -> None:
        self._buckets = buckets
        self._begins = [0, *accumulate(bucket.num_bytes for bucket in buckets)]
        self._staged = None if memory is None else memory.reserve(self._begins[-1], deadline=deadline, what=what)
        largest = max(bucket.num_bytes for bucket in buckets)
        has_scratch = memory is None or self._is_copied
        if has_scratch and (not self._scratch or self._scratch[0].numel() < largest):
            # Zeroed once, so that padding holds no data of other programs.
            self._scratch = tuple(torch.zeros(largest, dtype=torch.uint8, device=self._device) for _ in range(2))

    def buffer(self, index: int, count: int = 1) -> torch.Tensor:
        if self._staged is None:
            return self._scratch[index % 2][: self._buckets[index].num_bytes]
        return self._staged[self._begins[index] : self._begins[index + count]]

    def arrived(self, index: int) -> torch.Tensor:
        return self._scratch[index % 2][: self._buckets[index].num_bytes] if self._is_copied else self.buffer(index)

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        self._operations[index] = self._communicator.start(
            self.arrived(index), root=self._buckets[index].sender, deadline=deadline, what=what
        )

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        self._operations.pop(index).wait(deadline=deadline, what=what)
        if self._is_copied and self._staged is not None:
            # The next bucket is on its way meanwhile. This one's scratch is used again by the next but one.
            self.buffer(index).copy_(self.arrived(index), non_blocking=True)
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()

    def end(self) -> None:
        self._staged = None
        if self._device.type == "cuda":
            self._scratch = ()  # trainer and engine need it

    def close(self, *, has_failed: bool) -> None:
        self._staged, self._operations, self._scratch = None, {}, ()
