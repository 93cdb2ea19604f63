"""Compute the loss that balances the experts of a layer, sequence by sequence.

N tokens in a micro-batch, S samples, E experts, K of them for each token.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def load_balancing_loss(
    probabilities: Tensor,
    selected: Tensor,
    paths: Tensor,
    weights: Tensor,
    *,
    add_over_ranks: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return sum_s w_s * sum_e f_se * P_se, which is sum_s w_s if each expert gets the same share of each sample.

    f_se = E / (K * T_s) * (number of the sample's tokens that expert e computes), P_se = 1 / T_s * sum of the router's
    probabilities of e over its T_s tokens. f has no gradient. The loss of a sample needs that sample alone, so that it
    does not depend on rows, micro-batches or ranks; one over the batch's f would, since f is not known before the last
    micro-batch.

    Args:
        probabilities: float32[N, E], softmax of the router's logits; the only input that carries gradient.
        selected: int64[N, K], the experts of each token.
        paths: float32[S, N], 1 / T_s on the tokens of a sample, 0 elsewhere; tokens that samples share are in several.
        weights: float32[S], w: the sum of a sample's token weights, so that the step's `loss_scale` gives the mean.
        add_over_ranks: sums a tensor over ranks that hold other tokens of the same samples; None: there are none.
    Returns: float32[], to be summed over layers, micro-batches and ranks.
    Source: arXiv:2412.19437 eq. 17 to 20 (DeepSeek-V3's sequence-wise balance loss); of a batch as one sequence it is
        arXiv:2101.03961 eq. 4 to 6 over K, which transformers computes as `load_balancing_loss_func`.
    """
    num_experts, per_token = probabilities.shape[1], selected.shape[1]
    chosen = torch.zeros_like(probabilities).scatter_(1, selected, 1.0)
    shares = num_experts / per_token * (paths @ chosen)  # f, float32[S, E]
    if add_over_ranks is not None:
        shares = add_over_ranks(shares)  # P need not be known whole: the loss is linear in it
    return (weights[:, None] * shares * (paths @ probabilities)).sum()
