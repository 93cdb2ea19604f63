"""Sums of one trainer -> sums over all trainers, for metrics."""

import torch
import torch.distributed as dist
from torch import Tensor

from coati_rl.algorithms.sums import is_maximum


def reduce_sums(sums: dict[str, Tensor], *, device: torch.device) -> dict[str, float]:
    """Add up (or take the maximum of) each number over the default process group; collective, two calls in all."""
    reduced: dict[str, float] = {}
    for operation, names in (
        (dist.ReduceOp.SUM, sorted(name for name in sums if not is_maximum(name))),
        (dist.ReduceOp.MAX, sorted(name for name in sums if is_maximum(name))),
    ):
        if names:
            packed = torch.stack([sums[name].to(device) for name in names])
            dist.all_reduce(packed, operation)
            reduced.update(zip(names, packed.tolist(), strict=True))
    return reduced
