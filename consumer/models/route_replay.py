"""Compute a router's outputs for experts that an engine chose, and compare them with the router's own choice.

N tokens, D decoder layers, E experts, K of them for each token.
"""

from typing import Any

import torch
from torch import Tensor, nn

# Whether the weights of a token's experts add up to 1, where the router has no attribute that says so.
_NORMALISES = {"MixtralTopKRouter": True, "DeepseekV2TopkRouter": False}


def engine_choice(routes: Tensor, layer: int, selected: Tensor, *, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the experts of a layer that the engine chose, int64[N, K], and where these are known, bool[N].

    Where they are not known they are the router's own.

    Args:
        routes: uint[N, D, K], see `coati_rl.routes`.
        layer: number of the decoder layer.
        selected: int64[N, K], the router's own choice.
        num_experts: E.
    """
    chosen = routes[:, layer].long()
    is_known = chosen[:, 0] < num_experts
    return torch.where(is_known[:, None], chosen, selected), is_known


def expert_weights(router: nn.Module, logits: Tensor, chosen: Tensor) -> Tensor:
    """Return the weights that a router of transformers gives these experts, float32[N, K]; with gradient.

    Args:
        router: of the architectures in `ROUTED`, whose probabilities are the softmax of the logits.
        logits: [N, E].
        chosen: int64[N, K].
    """
    of: Any = router
    weights = logits.softmax(dim=-1, dtype=torch.float32).gather(-1, chosen)
    if getattr(of, "norm_topk_prob", _NORMALISES.get(type(router).__name__)):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * getattr(of, "routed_scaling_factor", 1.0)


def share_of_others(chosen: Tensor, selected: Tensor) -> Tensor:
    """Return which share of a token's chosen experts the router has not selected, float32[N]; the order is no matter.

    Both are int64[N, K].
    """
    is_other = (chosen[:, :, None] != selected[:, None, :]).all(dim=-1)
    return is_other.float().mean(dim=-1)
