"""Reduce numbers over all trainers: reported metrics, and the sum of squares for the gradient norm."""

import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.algorithms.sums import is_maximum
from consumer.parallel.process_group import collective


def reduce_sums(sums: dict[str, Tensor], *, device: torch.device, group: dist.ProcessGroup | None) -> dict[str, float]:
    """Sum (or take the maximum of) each number over the group, in two collectives.

    Args:
        sums: float64[] each, under the same names on all ranks.
        device: of the group's collectives.
        group: the ranks with different samples; None if there is only this one.
    """
    reduced: dict[str, float] = {}
    for operation, names in (
        (dist.ReduceOp.SUM, sorted(name for name in sums if not is_maximum(name))),
        (dist.ReduceOp.MAX, sorted(name for name in sums if is_maximum(name))),
    ):
        if names:
            packed = torch.stack([sums[name].to(device) for name in names])
            if group is not None:
                with collective("sum metrics over trainers"):
                    dist.all_reduce(packed, operation, group=group)
            reduced.update(zip(names, packed.tolist(), strict=True))
    return reduced


def add_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over the default group, element by element and in place; collective."""
    with collective("sum the record of the gradient"):
        dist.all_reduce(values)
    return values


def sum_over_ranks(value: float, *, device: torch.device) -> float:
    """Sum a number over the default group, in float64; collective."""
    total = torch.tensor(value, dtype=torch.float64, device=device)
    with collective("compute the gradient norm"):
        dist.all_reduce(total)
    return float(total)
