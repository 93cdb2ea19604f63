"""Memory of a member's own for the buckets of an update: kept by turns on CPU, fresh on CUDA.

On CPU the first write to fresh memory costs more than the transfer (a page fault per 4 KiB), so that two sets of
buffers are kept and used by turns: twice the update's size. CUDA's caching allocator has no such cost, and the memory
is dear: it is free again after the commit.
"""

import torch


class StagingMemory:
    """Two sets of buffers; see `Carrier` for who may overwrite what."""

    def __init__(self) -> None:
        self._sets: tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]] = ({}, {})  # by bucket
        self._turn = 0

    def begin(self) -> None:
        """The next update's turn."""
        self._turn = 1 - self._turn

    def buffer(self, index: int, num_bytes: int, device: torch.device) -> torch.Tensor:
        """uint8[num_bytes] that no staged update but the one before the last is in."""
        kept = self._sets[self._turn].get(index)
        if kept is not None and kept.numel() == num_bytes:
            return kept
        # Zeroed once, so that padding is not someone else's memory.
        fresh = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        if device.type == "cpu":
            self._sets[self._turn][index] = fresh
        return fresh
