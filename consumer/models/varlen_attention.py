"""Attend to many paths at once with flash attention's varlen kernel, and add up the gradients of what paths share.

The kernel takes half precision on GPUs, and aligns causality and windows to the last key of a path. It is called below
autograd, which would keep the joined keys and values for the backward.

R rows, L tokens of a row, l of them on this rank, H heads of queries, N of keys, D size of a head.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from coati_rl.ops.host_copies import on_device
from consumer.models.context_cut import Pieces
from consumer.models.path_attention import ForBackward, Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class VarlenPaths:
    """Hold where the paths of a rank's pieces lie, and the kernel's boundaries of them."""

    ranges: tuple[tuple[int, int, int], ...]  # row, start, end of the paths' parts, one path after the other
    boundaries: tuple[Tensor, Tensor, int, int]  # int32[paths + 1] of queries and of keys, and the longest of them

    @classmethod
    def of(cls, pieces: Pieces, device: torch.device) -> "VarlenPaths":
        """Take a rank's pieces of each row."""
        sizes = [[each.length for row in pieces for each in row], [each.num_keys for row in pieces for each in row]]
        queries, keys = (
            on_device(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device) for lengths in sizes
        )
        ranges = tuple((row, *each) for row, of_row in enumerate(pieces) for piece in of_row for each in piece.ranges)
        return cls(ranges=ranges, boundaries=(queries, keys, max(sizes[0]), max(sizes[1])))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
        """Attend [R, l, H, D] to [R, L, N, D]. Returns: [R, l, H, D], and log-sum-exps, float32[H, R * l]."""
        paths = (self._joined(each) for each in (key, value))
        attended, log_sums, *_ = torch.ops.aten._flash_attention_forward(
            query.flatten(0, 1), *paths, *self.boundaries, 0.0, settings.window is None, False, **_options(settings)
        )
        return attended.view(query.shape), log_sums

    def add_gradients(self, of: ForBackward, settings: Settings, *, into: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add the gradients of query, key and value to `into`, in an order that does not change from run to run."""
        gradient, attended, log_sums, query, *rows = of
        seeds = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, which there is none of
        paths = (self._joined(each) for each in rows)
        own, *of_paths = torch.ops.aten._flash_attention_backward(
            gradient.flatten(0, 1),
            query.flatten(0, 1),
            *paths,
            attended.flatten(0, 1),
            log_sums,
            *self.boundaries,
            0.0,
            settings.window is None,
            seeds,
            query.new_empty(0),
            **_options(settings),
        )
        into[0].add_(own.view(query.shape))
        for target, joined in zip(into[1:], of_paths, strict=True):
            parts = joined.split([end - start for _, start, end in self.ranges])
            for (row, start, end), part in zip(self.ranges, parts, strict=True):
                target[row, start:end] += part

    def _joined(self, rows: Tensor) -> Tensor:
        """Return the tokens of all paths, [tokens, N, D]."""
        return torch.cat([rows[row, start:end] for row, start, end in self.ranges])


def _options(settings: Settings) -> dict[str, Any]:
    """Return the scale, and how many tokens before and after it a query sees."""
    left = -1 if settings.window is None else settings.window - 1
    return {"scale": settings.scaling, "window_size_left": left, "window_size_right": 0}
