"""Test the order in which members that share memory write it and say so."""

from typing import Any

import torch

from coati_rl.transport.deadline import Deadline
from coati_rl.transport.manifest import Bucket, BucketItem, TensorEntry
from coati_rl.transport.segments import SegmentTransport


class Recorded:
    """A segment, and the communicator beside it, that note what they are asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def create(self) -> str:
        return "name"

    def remove_name(self) -> None:
        pass

    def map(self, **_: Any) -> torch.Tensor:
        return torch.zeros(64, dtype=torch.uint8)

    def synchronize(self) -> None:
        self.calls.append("make what was written visible")

    def start(self, *_: Any, what: str, **options: Any) -> "Recorded":
        if what == "a bucket":
            self.calls.append("say that it is complete")
        return self

    def wait(self, **_: Any) -> None:
        pass


def test_what_the_owner_wrote_is_visible_before_others_are_told() -> None:
    recorded, deadline = Recorded(), Deadline(60.0)
    transport: Any = SegmentTransport(recorded, lambda name, num_bytes: recorded, rank=0, world_size=2)
    entry = TensorEntry(name="weight", dtype="float32", shape=(16,))
    bucket = Bucket(items=(BucketItem(entry=entry, offset=0, num_bytes=64),), num_bytes=64)
    transport.begin([bucket], memory=None, deadline=deadline, what="begin")
    transport.start(0, deadline=deadline, what="a bucket")
    assert recorded.calls == ["make what was written visible", "say that it is complete"]
