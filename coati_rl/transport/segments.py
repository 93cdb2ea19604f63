"""Share buckets in memory that all members map: the sender packs into it, staged tensors are views of it, no copy.

A segment holds all buckets of one sender. Each sender has two, used alternately (see `BucketTransport` for the lifetime
of memory), so that all members of a node together need twice the update. The communicator carries one byte per bucket,
which says that the bucket is complete.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from coati_rl.transport.communicator import Communicator, Operation, barrier, broadcast_text
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.manifest import Bucket
from coati_rl.transport.staging_memory import StagingMemory


class Segment(Protocol):
    """Represent memory of one member that the others map too."""

    def create(self) -> str:
        """Create the segment, on the owner. Returns: what the others need to open it."""

    def open(self, text: str) -> None:
        """Open the segment, on the others. Raises: TransferError."""

    def remove_name(self) -> None:
        """Remove its name, when all have opened it or one failed: nothing is left then, however a process ends."""

    def map(self, *, is_owner: bool, deadline: Deadline, what: str) -> torch.Tensor:
        """Map it as uint8[num_bytes], which is unmapped when its last view is freed. Raises: TransferError."""

    def close(self) -> None:
        """Release it without mapping it."""

    def synchronize(self) -> None:
        """Make what the owner wrote visible to the others."""


class SegmentTransport:
    """Implement `BucketTransport`; `make_segment(name, num_bytes)` decides the kind of memory."""

    def __init__(
        self,
        communicator: Communicator,
        make_segment: Callable[[str, int], Segment],
        *,
        rank: int,
        world_size: int,
    ) -> None:
        self._communicator = communicator  # of CPU tensors
        self._make_segment = make_segment
        self._rank = rank
        self._world_size = world_size
        self._turn = 0
        self._num_made = 0
        self._segments: dict[tuple[int, int], tuple[Segment, torch.Tensor]] = {}  # by sender and turn
        self._slices: list[tuple[int, int, int]] = []  # sender, offset and size of each bucket
        self._operations: dict[int, Operation] = {}

    def begin(self, buckets: Sequence[Bucket], *, memory: StagingMemory | None, deadline: Deadline, what: str) -> None:
        self._turn = 1 - self._turn
        needs: dict[int, int] = {}
        self._slices = []
        for bucket in buckets:
            offset = needs.get(bucket.sender, 0)
            self._slices.append((bucket.sender, offset, bucket.num_bytes))
            needs[bucket.sender] = offset + bucket.num_bytes
        for sender, num_bytes in sorted(needs.items()):
            existing = self._segments.get((sender, self._turn))
            if existing is None or existing[1].numel() < num_bytes:  # all members decide the same
                self._segments.pop((sender, self._turn), None)
                self._segments[sender, self._turn] = self._map_segment(sender, num_bytes, deadline, what)

    def buffer(self, index: int, count: int = 1) -> torch.Tensor:
        sender, offset, _ = self._slices[index]
        num_bytes = sum(size for _, _, size in self._slices[index : index + count])
        return self._segments[sender, self._turn][1][offset : offset + num_bytes]

    def arrived(self, index: int) -> torch.Tensor:
        return self.buffer(index)

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        sender = self._slices[index][0]
        if sender == self._rank:
            self._segments[sender, self._turn][0].synchronize()
        word = torch.zeros(1, dtype=torch.uint8)
        self._operations[index] = self._communicator.start(word, root=sender, deadline=deadline, what=what)

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        self._operations.pop(index).wait(deadline=deadline, what=what)

    def end(self) -> None:
        """See `BucketTransport.end`."""

    def close(self, *, has_failed: bool) -> None:
        self._segments, self._operations = {}, {}

    def _map_segment(self, sender: int, num_bytes: int, deadline: Deadline, what: str) -> tuple[Segment, torch.Tensor]:
        what = f"{what}: sharing {num_bytes} bytes of rank {sender}"
        segment = self._make_segment(str(self._num_made), num_bytes)
        self._num_made += 1
        is_owner = sender == self._rank
        try:
            text = segment.create() if is_owner else ""
            text = broadcast_text(self._communicator, text, root=sender, deadline=deadline, what=what)
            if not is_owner:
                segment.open(text)
            barrier(self._communicator, rank=self._rank, world_size=self._world_size, deadline=deadline, what=what)
        except BaseException:
            segment.close()
            raise
        finally:
            segment.remove_name()
        return segment, segment.map(is_owner=is_owner, deadline=deadline, what=what)
