"""Share the experts of a layer out over tensor-parallel ranks: each holds whole experts, and all tokens pass all ranks.

A rank computes the tokens that its experts were chosen for; the sum over ranks is the layer's output. The router is on
every rank. Its weights, and the hidden states, get a part of their gradient on each rank, which the backward sums here,
so that all parameters outside of the experts have the whole gradient.

N tokens, H hidden size, E experts, K of them for each token.
"""

from types import MethodType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from consumer.parallel.rank_sums import sum_backward, sum_forward


class ExpertsOfRank(nn.Module):
    """Stand for the replacement of a layer's experts, as ColossalAI calls it; the module itself stays, with fewer."""

    @staticmethod
    def from_native_module(module: nn.Module, process_group: dist.ProcessGroup, **_: Any) -> nn.Module:
        """Keep this rank's experts of transformers' module, whose parameters are [E, ...].

        Raises: ValueError if the ranks do not divide E.
        """
        experts: Any = module
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if experts.num_experts % size:
            raise ValueError(f"{experts.num_experts} experts cannot be shared out over {size} ranks")
        for parameter in module.parameters():
            parameter.data = parameter.data.chunk(size)[rank].clone()
        experts.num_experts //= size
        experts._is_expert_parallel = True  # transformers then leaves out the number behind the last expert
        experts.forward = MethodType(_forward_of(process_group, first=rank * experts.num_experts), module)
        return module


def _forward_of(group: dist.ProcessGroup, *, first: int) -> Any:
    """Return the forward of a module whose experts begin with number `first`."""

    def forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return [N, H] of hidden states [N, H], chosen experts int64[N, K] and their weights [N, K]."""
        hidden_states = sum_backward(hidden_states, group)
        own = top_k_index - first
        is_own = (own >= 0) & (own < module.num_experts)
        own = own.masked_fill(~is_own, module.num_experts)
        weights = sum_backward(top_k_weights, group).masked_fill(~is_own, 0.0)
        found = type(module).forward(module, hidden_states, own, weights)
        return sum_forward(found, group)

    return forward
