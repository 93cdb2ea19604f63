"""Carry the bytes of an update's buckets from their sender to all other members, whatever carries them.

What flows: `begin` agrees on memory, `buffer(k)` is where bucket k is packed by its sender and found by the others,
`start(k)` sends it on its way, `finish(k)` returns when it is there, `end` comes when all members have all buckets.
Every member makes the same calls in the same order; bucket k + 1 may be started before bucket k is finished, so that
packing, sending and checking overlap. Checks, digests and deadlines are above this protocol and the same for all.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from coati_rl.transport.deadline import Deadline
from coati_rl.transport.manifest import Bucket


class Carrier(Protocol):
    """One of: a collective (gloo, NCCL), shared segments (shm, CUDA IPC), files.

    Who may overwrite what: a staged update keeps its memory until the second update after it begins, since memory is
    used by turns. An engine stages update n + 1 only after update n has been committed or dropped, and a commit keeps
    no reference to staged tensors when it ends; so nobody reads what is overwritten, with one update to spare.
    """

    def begin(
        self, buckets: Sequence[Bucket], *, device: torch.device, is_staging: bool, deadline: Deadline, what: str
    ) -> None:
        """Get memory for an update.

        Args:
            device: where this member wants its buffers, if they are its own.
            is_staging: the buffers have to outlive the update (engines); a sender's need not.
        """

    def buffer(self, index: int) -> torch.Tensor:
        """uint8[bucket.num_bytes] of bucket `index`; on a sender, good until bucket `index` + 1 is finished."""

    def start(self, index: int, *, deadline: Deadline, what: str) -> None:
        """The sender of bucket `index` has packed it; the others are ready for it."""

    def finish(self, index: int, *, deadline: Deadline, what: str) -> None:
        """Return when bucket `index` has left (its sender) or is in its buffer (others)."""

    def end(self) -> None:
        """All members have all buckets: clean up what only the way itself needed; `buffer` is of no use now."""

    def close(self, *, has_failed: bool) -> None:
        """Leave nothing behind. Tensors that have been staged stay valid."""
