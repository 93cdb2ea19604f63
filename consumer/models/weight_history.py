"""Keep weights of earlier policy versions in host memory, and swap them into the model for a forward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_PIECE_ELEMENTS = 2**20  # fits a CPU's cache; large enough for efficient transfers to a GPU


class WeightHistory:
    """Keep the newest versions of one rank's parameters, in their dtype; in pinned memory if they are on a GPU.

    Kept and live weights are swapped piece by piece, so that the device needs memory for one more piece only.
    """

    def __init__(self, parameters: Iterable[Tensor], *, max_versions: int) -> None:
        """Start without copies; `max_versions` is the largest number of copies, 0 keeps none."""
        self._live = list(parameters)
        self._max_versions = max_versions
        self._kept: dict[int, list[Tensor]] = {}  # oldest first

    @property
    def versions(self) -> frozenset[int]:
        """Return the kept versions."""
        return frozenset(self._kept)

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the live weights under this version; with too many versions, the oldest one's memory is reused."""
        if self._max_versions == 0:
            return
        is_full = len(self._kept) >= self._max_versions
        copies = self._kept.pop(next(iter(self._kept))) if is_full else [_host_memory(live) for live in self._live]
        for copy, live in zip(copies, self._live, strict=True):
            copy.copy_(live)
        self._kept[version] = copies

    @contextmanager
    def swapped_in(self, version: int) -> Iterator[None]:
        """Run the body with the parameters of this version; afterwards the live ones are restored bit for bit.

        Raises: KeyError if the version is not kept.
        """
        kept = self._kept[version]
        self._swap(kept)
        try:
            yield
        finally:
            self._swap(kept)

    @torch.no_grad()
    def _swap(self, kept: list[Tensor]) -> None:
        for copies, lives in zip(map(_pieces, kept), map(_pieces, self._live), strict=True):
            for copy, live in zip(copies, lives, strict=True):
                spare = live.clone()
                live.copy_(copy)
                copy.copy_(spare)


def _pieces(tensor: Tensor) -> tuple[Tensor, ...]:
    """Split a tensor into views of a few rows each."""
    rows = torch.atleast_1d(tensor)
    return rows.split(max(1, _PIECE_ELEMENTS // max(1, rows[:1].numel())))


def _host_memory(live: Tensor) -> Tensor:
    return torch.empty_like(live, device="cpu", requires_grad=False, pin_memory=live.is_cuda)
