"""Share the experts of a layer out over ranks with other tokens, which go to the ranks of their experts, and back.

Each of D ranks holds E / D experts. A rank sorts its tokens by expert, so that those for one rank are consecutive,
sends them in one exchange, computes what it was sent, and gets its own results back in a second exchange. The router's
weights are applied where the router is. No token is dropped: an exchange is as large as the choices make it. The
backward of an exchange is the opposite one.

N tokens of this rank, K experts for each, H hidden size.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def expert_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that hold all experts of a layer, by name; their parameters are [E, ...]."""
    return {
        name: module
        for name, module in model.named_modules()
        if name.endswith(".experts") and isinstance(getattr(module, "num_experts", None), int)
    }


def share_experts_out(model: nn.Module, group: dist.ProcessGroup) -> list[nn.Module]:
    """Keep this rank's experts of each layer, as views of the data, and let tokens come from all ranks of the group.

    Returns: the modules that hold them.
    Raises: ValueError if the ranks do not divide E.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    modules: list[Any] = [*expert_modules(model).values()]
    for module in modules:
        if module.num_experts % size:
            raise ValueError(f"{module.num_experts} experts cannot be shared out over {size} ranks")
        for parameter in module.parameters():
            parameter.data = parameter.data.chunk(size)[rank]
        module.num_experts //= size
        module.forward = MethodType(_forward_of(type(module).forward, group, size), module)
    return modules


def _forward_of(compute: Any, group: dist.ProcessGroup, size: int) -> Any:
    """Return the forward of a module with E / D experts, whose own forward is `compute`."""

    def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [N, H] of hidden states [N, H], chosen experts int64[N, K] of all E, and their weights [N, K]."""
        num_own, num_chosen = module.num_experts, top_k_index.shape[-1]
        by_expert, order = top_k_index.flatten().sort(stable=True)
        counts = torch.bincount(by_expert, minlength=size * num_own)
        arriving = torch.empty_like(counts)  # of each rank in turn, for each of this rank's experts
        dist.all_to_all_single(arriving, counts, group=group)
        leaving, coming = torch.stack([counts, arriving]).view(2, size, num_own).sum(dim=-1).tolist()
        rows = exchange(hidden_states[order // num_chosen], leaving, coming, group)
        own = torch.arange(num_own, device=rows.device).repeat(size).repeat_interleave(arriving)
        if not len(rows):  # its experts still take part in the backward, where ranks that share them wait for all
            rows, own = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), own.new_zeros(1)
        found = compute(module, rows, own[:, None], torch.ones_like(own[:, None], dtype=rows.dtype))
        returned = exchange(found[: sum(coming)], coming, leaving, group)
        chosen = returned[order.argsort()].view(*top_k_index.shape, -1)
        return (chosen * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)

    return forward


def exchange(rows: Tensor, leaving: Sequence[int], coming: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive rows to each rank of a group, and return what comes, in the order of ranks; collective.

    Args:
        rows: [sum(leaving), H].
        leaving: rows for each rank.
        coming: rows from each rank.
        group: the ranks.
    Returns: [sum(coming), H], whose gradient goes the other way.
    """
    return _Exchange.apply(rows, leaving, coming, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, leaving: Sequence[int], coming: Sequence[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.leaving, ctx.coming, ctx.group = leaving, coming, group
        return _sent(rows, leaving, coming, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _sent(gradient, ctx.coming, ctx.leaving, ctx.group), None, None, None


def _sent(rows: Tensor, leaving: Sequence[int], coming: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    found = rows.new_empty(sum(coming), rows.shape[1])
    dist.all_to_all_single(found, rows.contiguous(), [*coming], [*leaving], group=group)
    return found
