"""Keep the weights of earlier versions in host memory, and put them in place of the live ones for a forward."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_PIECE_ELEMENTS = 2**20  # small enough for a CPU's cache, large enough for a GPU's bus


class WeightHistory:
    """The newest versions of one rank's parameters, in their own dtype; page-locked where the parameters are on a GPU.

    Versions trade places with the live weights piece by piece, so that the device holds one piece more and no model.
    """

    def __init__(self, parameters: Iterable[Tensor], *, max_versions: int) -> None:
        """`max_versions`: how many copies there are at most; 0 keeps none."""
        self._live = list(parameters)
        self._max_versions = max_versions
        self._kept: dict[int, list[Tensor]] = {}  # oldest first

    @property
    def versions(self) -> frozenset[int]:
        """Versions that are kept."""
        return frozenset(self._kept)

    @torch.no_grad()
    def keep(self, version: int) -> None:
        """Copy the live weights under this version; of too many, the oldest is forgotten and its memory used again."""
        if self._max_versions == 0:
            return
        is_full = len(self._kept) >= self._max_versions
        copies = self._kept.pop(next(iter(self._kept))) if is_full else [_host_memory(live) for live in self._live]
        for copy, live in zip(copies, self._live, strict=True):
            copy.copy_(live)
        self._kept[version] = copies

    @contextmanager
    def in_place(self, version: int) -> Iterator[None]:
        """Inside, the parameters are those of this version; afterwards they are bit for bit what they were.

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
    """Views of a few rows each."""
    rows = torch.atleast_1d(tensor)
    return rows.split(max(1, _PIECE_ELEMENTS // max(1, rows[:1].numel())))


def _host_memory(live: Tensor) -> Tensor:
    return torch.empty_like(live, device="cpu", requires_grad=False, pin_memory=live.is_cuda)
