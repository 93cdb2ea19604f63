"""Buckets in memory that all members map: the sender packs into it, the staged tensors are views of it; no byte moves.

A segment holds all buckets of one sender. Each sender has two, used by turns (see `Carrier` for who may overwrite what
when), so that the footprint is twice the update for all members of a node together. What goes over the communicator is
one byte per bucket: "it is there".
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from coati_rl.transport.communicator import Communicator, Operation, broadcast_text, meet
from coati_rl.transport.deadline import Deadline
from coati_rl.transport.manifest import Bucket


class Segment(Protocol):
    """Memory of one member that the others map, too."""

    def create(self) -> str:
        """The owner's first step. Returns: what the others need to open it."""

    def open(self, text: str) -> None:
        """The others' first step. Raises: TransferError."""

    def hide(self) -> None:
        """All have opened it, or somebody failed: from now on nothing is left behind however a process ends."""

    def map(self, *, is_owner: bool, deadline: Deadline, what: str) -> torch.Tensor:
        """Last step: uint8[num_bytes], given back when its last view is gone. Raises: TransferError."""

    def close(self) -> None:
        """It will not be mapped."""

    def synchronize(self) -> None:
        """The owner's: what was written to it is there for the others."""


class SegmentCarrier:
    """A `Carrier`; `make_segment(name, num_bytes)` decides what the memory is."""

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
        self._places: list[tuple[int, int, int]] = []  # sender, offset and size of each bucket
        self._operations: dict[int, Operation] = {}

    def begin(
        self, buckets: Sequence[Bucket], *, device: torch.device, is_staging: bool, deadline: Deadline, what: str
    ) -> None:
        """See `Carrier.begin`."""
        self._turn = 1 - self._turn
        needs: dict[int, int] = {}
        self._places = []
        for bucket in buckets:
            offset = needs.get(bucket.sender, 0)
            self._places.append((bucket.sender, offset, bucket.num_bytes))
            needs[bucket.sender] = offset + bucket.num_bytes
        for sender, num_bytes in sorted(needs.items()):
            kept = self._segments.get((sender, self._turn))
            if kept is None or kept[1].numel() < num_bytes:  # every member decides alike
                self._segments.pop((sender, self._turn), None)
                self._segments[sender, self._turn] = self._share(sender, num_bytes, deadline, what)

    def buffer(self, index: int) -> torch.Tensor:
        """See `Carrier.buffer`."""
        sender, offset, num_bytes = self._places[index]
        return self._segments[sender, self._turn][1][offset : offset + num_bytes]

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `Carrier.start`."""
        sender = self._places[index][0]
        if sender == self._rank:
            self._segments[sender, self._turn][0].synchronize()
        word = torch.zeros(1, dtype=torch.uint8)
        self._operations[index] = self._communicator.start(word, root=sender, deadline=deadline, what=what)

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        """See `Carrier.finish`."""
        self._operations.pop(index).wait(deadline=deadline, what=what)

    def end(self) -> None:
        """See `Carrier.end`."""

    def close(self, *, has_failed: bool) -> None:
        """See `Carrier.close`."""
        self._segments, self._operations = {}, {}

    def _share(self, sender: int, num_bytes: int, deadline: Deadline, what: str) -> tuple[Segment, torch.Tensor]:
        what = f"{what}: sharing {num_bytes} bytes of rank {sender}"
        segment = self._make_segment(str(self._num_made), num_bytes)
        self._num_made += 1
        is_owner = sender == self._rank
        try:
            text = segment.create() if is_owner else ""
            text = broadcast_text(self._communicator, text, root=sender, deadline=deadline, what=what)
            if not is_owner:
                segment.open(text)
            meet(self._communicator, rank=self._rank, world_size=self._world_size, deadline=deadline, what=what)
        except BaseException:
            segment.close()
            raise
        finally:
            segment.hide()
        return segment, segment.map(is_owner=is_owner, deadline=deadline, what=what)
