"""Allocate a member's own memory for the buckets of an update: two reused sets on CPU, new memory on CUDA.

On CPU the first write to new memory costs more than the transfer (a page fault per 4 KiB), so that two sets of buffers
are existing and used alternately: twice the update's size. CUDA's caching allocator has no such cost, and GPU memory is
scarce: it is freed after the commit.
"""

import torch


class StagingMemory:
    """Hold two sets of buffers; see `BucketTransport` for the lifetime of memory."""

    def __init__(self) -> None:
        self._sets: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})  # by bucket
        self._turn = 0

    def begin(self) -> None:
        """Switch to the next update's set."""
        self._turn = 1 - self._turn

    def buffer(self, index: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """Return uint8[num_bytes] that is not in use, except by the staged update before the last one."""
        existing = self._sets[self._turn].get(index)
        if existing is not None and existing.numel() == num_bytes:
            return existing
        # Zeroed once, so that padding holds no data of other programs.
        fresh = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._sets[self._turn][index] = fresh
        return fresh
