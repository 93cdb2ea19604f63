"""Sum over tensor-parallel ranks in float32, in the forward or in the backward alone.

Of an adapter: a layer whose weight is cut by columns of its output has B cut likewise, and each rank's gradient of
A @ x is a part of it; one whose weight is cut by rows of its input has A cut likewise, and each rank's A @ x is a part.
What is summed are vectors of the adapter's rank, not hidden states. Of a layer's experts: outputs, and gradients of
inputs.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def sum_forward(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the sum over the group's ranks; its gradient is the same on all of them. Any shape."""
    return _SumForward.apply(values, group)


def sum_backward(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the values, whose gradient is the sum over the group's ranks. Any shape."""
    return _SumBackward.apply(values, group)


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(values, group)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


def _sum(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total.to(values.dtype)
