"""Exchange what context-parallel ranks need of each other's tokens, with exact gradients.

Each rank computes the layers on its own tokens, and the log-probabilities of the loss tokens that these predict. Keys
and values of all tokens are gathered for attention; log-probabilities of all loss tokens are gathered for a loss that
needs whole samples, which every rank then computes alike.

C context-parallel ranks, R rows, L tokens of a padded row, l = L / C of a rank, M loss tokens of a row, m on one rank
at most, N heads of keys, D size of a head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from coati_rl.algorithms.sums import is_maximum
from coati_rl.ops.host_copies import on_device
from consumer.models.context_cut import ContextCut, Pieces


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextRank:
    """Name one of the ranks that share each row's tokens."""

    rank: int
    size: int
    group: dist.ProcessGroup

    def gather(self, mine: Tensor) -> Tensor:
        """Return the tensors of all ranks, [C, ...]; without gradient."""
        of_ranks = mine.new_empty((self.size * len(mine), *mine.shape[1:]))
        dist.all_gather_into_tensor(of_ranks, mine.contiguous(), group=self.group)
        return of_ranks.view(self.size, *mine.shape)

    def sum(self, mine: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks; without gradient."""
        total = mine.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def scatter_sum(self, of_ranks: Tensor) -> Tensor:
        """Return the sum over ranks of what each has for this rank, of [C, ...]."""
        mine = of_ranks.new_empty(of_ranks.shape[1:])
        dist.reduce_scatter_tensor(mine, of_ranks.flatten(0, 1).contiguous(), group=self.group)
        return mine


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPart:
    """Hold one rank's part of a micro-batch's tokens, on its device. Its methods are collective over the ranks."""

    own: ContextRank
    pieces: Pieces  # of this rank
    order: Tensor  # int64[R, L], of each place in the row its number among all ranks' tokens, rank after rank
    inverse: Tensor  # int64[R, L], of each of all ranks' tokens its place in the row
    loss_places: Tensor  # int64[C, R, m], in R * M; R * M: none
    loss_shape: tuple[int, int]  # (R, M)
    longest_path: int  # tokens
    whole_arrays: dict[str, Tensor]  # the loss arrays of all ranks, [R, M], without hidden states

    @classmethod
    def of(
        cls, cut: ContextCut, own: ContextRank, whole_arrays: dict[str, Tensor], device: torch.device
    ) -> "ContextPart":
        """Make a rank's part of a cut."""
        ranks, rows, length = cut.places.shape
        inverse = torch.from_numpy(cut.places.transpose(1, 0, 2).reshape(rows, ranks * length).copy())
        return cls(
            own=own,
            pieces=cut.pieces[own.rank],
            order=on_device(inverse.argsort(dim=1), device),
            inverse=on_device(inverse, device),
            loss_places=on_device(torch.from_numpy(cut.loss_places), device),
            loss_shape=(rows, whole_arrays["token_ids"].shape[1]),
            longest_path=cut.longest_path,
            whole_arrays=whole_arrays,
        )

    def gather_rows(self, mine: Tensor) -> Tensor:
        """Return all tokens of each row in order, [R, L, N, D], from this rank's [R, l, N, D]; without gradient."""
        rows, length = mine.shape[:2]
        of_ranks = self.own.gather(mine)
        joined = of_ranks.transpose(0, 1).reshape(rows, self.own.size * length, *mine.shape[2:])
        return _in_order(joined, self.order)

    def scatter_sums(self, gradient: Tensor) -> Tensor:
        """Sum gradients over ranks in float32, [R, L, N, D] of each, and return those of this rank, [R, l, N, D]."""
        rows, length = gradient.shape[:2]
        joined = _in_order(gradient.float(), self.inverse)
        by_rank = joined.view(rows, self.own.size, length // self.own.size, *gradient.shape[2:]).transpose(0, 1)
        return self.own.scatter_sum(by_rank)

    def gather_loss_values(self, mine: Tensor) -> Tensor:
        """Return the values of all loss tokens, [R, M, ...], from those of this rank's, [R, m, ...].

        They are 0 where the loss mask is False. All ranks go on alike, so that the gradient of this rank's values is
        that of its own result.
        """
        gathered: Tensor = _GatheredValues.apply(mine, self)
        return gathered

    def add_sums(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum (or take the maximum of) numbers that each rank reports for its own tokens, under the same names."""
        added = dict(sums)
        for operation, names in (
            (dist.ReduceOp.SUM, sorted(name for name in sums if not is_maximum(name))),
            (dist.ReduceOp.MAX, sorted(name for name in sums if is_maximum(name))),
        ):
            if names:
                packed = torch.stack([sums[name].to(self.order.device) for name in names])
                dist.all_reduce(packed, operation, group=self.own.group)
                added.update(zip(names, packed.unbind(), strict=True))
        return added


def _in_order(rows: Tensor, order: Tensor) -> Tensor:
    """Take the places int64[R, L] of each row [R, L, ...]; a single row is copied once."""
    taken = [row[places] for row, places in zip(rows, order, strict=True)]
    return taken[0][None] if len(taken) == 1 else torch.stack(taken)


class _GatheredValues(torch.autograd.Function):
    """Gather the values of loss tokens; the backward takes this rank's from the gradient of all."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, part: ContextPart) -> Tensor:
        of_ranks = part.own.gather(mine)
        rows, width = part.loss_shape
        spread = mine.new_zeros((rows * width + 1, *mine.shape[2:]))  # the last takes what is padding
        spread[part.loss_places.flatten()] = of_ranks.flatten(0, 2)
        ctx.part = part
        return spread[:-1].view(rows, width, *mine.shape[2:])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        part: ContextPart = ctx.part
        flat = gradient.flatten(0, 1)
        padded = torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])
        return padded[part.loss_places[part.own.rank]], None
