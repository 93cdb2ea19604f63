"""Declare the interface that moves an update's buckets from their sender to all other members.

`begin` allocates memory, `buffer(k)` is the memory that bucket k's sender packs and the others receive into, `start(k)`
starts sending it, `finish(k)` waits until it has arrived, `end` is called when all members have all buckets.
Every member makes the same calls in the same order; bucket k + 1 may be started before bucket k is finished, so that
packing, sending and checking overlap. Checks, digests and deadlines are implemented above this protocol, once for all.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from coati_rl.transport.deadline import Deadline
from coati_rl.transport.manifest import Bucket


class BucketTransport(Protocol):
    """Move buckets by a collective (gloo, NCCL), shared segments (shm, CUDA IPC) or files.

    Lifetime of memory: a staged update keeps its memory until the second update after it begins, since two sets of
    buffers are used alternately. An engine stages update n + 1 only after update n was committed or dropped, and a
    commit keeps no reference to staged tensors when it ends; so overwritten memory has no reader, with one update to
    spare.
    """

    def begin(
        self, buckets: Sequence[Bucket], *, device: torch.device, is_staging: bool, deadline: Deadline, what: str
    ) -> None:
        """Allocate memory for an update.

        Args:
            device: of this member's buffers, where the transport allocates them per member.
            is_staging: True if the buffers have to outlive the update (engines); a sender's need not.
        """

    def buffer(self, index: int) -> torch.Tensor:
        """Return uint8[bucket.num_bytes] of bucket `index`; valid on its sender until the next one is finished."""

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        """Start sending bucket `index`, which its sender has packed, or receiving it on the others."""

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        """Return when bucket `index` has been sent (its sender) or is in its buffer (others)."""

    def end(self) -> None:
        """Free what only the transfer needed, as all members have all buckets; `buffer` is invalid afterwards."""

    def close(self, *, has_failed: bool) -> None:
        """Free all resources. Tensors that have been staged stay valid."""
