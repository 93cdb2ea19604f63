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
from coati_rl.transport.staging_memory import StagingMemory


class BucketTransport(Protocol):
    """Move buckets by a collective (gloo, NCCL), shared segments (shm, CUDA IPC) or files.

    Lifetime of memory: a staged update keeps its memory until the engine begins to stage the next one, which it does
    only after the update was committed or dropped; a commit keeps no reference to staged tensors when it ends. Memory
    into which a sender packs directly is used by turns of two, as a sender may begin before an engine does.
    """

    def begin(self, buckets: Sequence[Bucket], *, memory: StagingMemory | None, deadline: Deadline, what: str) -> None:
        """Allocate memory for an update.

        Args:
            memory: for buffers that have to outlive the update (engines), where the transport does not share the
                sender's memory; None on a sender, whose buffers need not.
        """

    def buffer(self, index: int, count: int = 1) -> torch.Tensor:
        """Return uint8[N] of bucket `index`, or of `count` of a sender's that are staged one after the other.

        On its sender a bucket is valid until the next one is finished.
        """

    def arrived(self, index: int) -> torch.Tensor:
        """Return the bytes of `buffer(index)` where they arrived, until the next bucket but one is started."""

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        """Start sending bucket `index`, which its sender has packed, or receiving it on the others."""

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        """Return when bucket `index` has been sent (its sender) or is in its buffer (others)."""

    def end(self) -> None:
        """Free what only the transfer needed, as all members have all buckets; `buffer` is invalid afterwards."""

    def close(self, *, has_failed: bool) -> None:
        """Free all resources. Tensors that have been staged stay valid."""
