"""Compute the losses of reward models: of pairs of responses, and of labelled steps.

N pairs or steps, K label tokens (two: right and wrong). Losses are sums: the caller divides by the number of pairs or
steps of the global batch.
"""

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, *, center_coefficient: float = 0.0) -> Tensor:
    """Compute -log sigmoid(r_c - r_r - margin) + coefficient * (r_c + r_r)^2 of each pair.

    The second term keeps rewards centred on zero, which the first leaves open.

    Args:
        chosen: float[N], rewards r_c of the preferred responses; carries gradient.
        rejected: float[N], rewards r_r of the others; carries gradient.
        margin: float[N], by how much the rewards should differ, in units of the reward; 0: no demand.
        center_coefficient: weight of the second term, not negative.
    Returns: float[N].
    Raises: ValueError if shapes differ or the coefficient is negative.
    Source: arXiv:2203.02155 eq. 1; the margin is arXiv:2307.09288 eq. 2; the centre penalty is arXiv:2312.09244.
    """
    if not chosen.shape == rejected.shape == margin.shape:
        raise ValueError(f"chosen has {len(chosen)} rewards, rejected {len(rejected)}, and {len(margin)} margins")
    if center_coefficient < 0:
        raise ValueError(f"center_coefficient must not be negative: {center_coefficient}")
    return -F.logsigmoid(chosen - rejected - margin) + center_coefficient * (chosen + rejected).square()


def label_loss(logprobs: Tensor, target: Tensor, *, is_restricted: bool) -> Tensor:
    """Compute the cross-entropy -sum_k target_k * log p_k of each step's label tokens.

    Args:
        logprobs: float[N, K], log-probabilities of the label tokens over the vocabulary, nats; carries gradient.
        target: float[N, K], target probabilities; each row adds up to 1.
        is_restricted: normalise p over the K label tokens. It is their softmax, since the normaliser over the
            vocabulary cancels.
    Returns: float[N], nats.
    Raises: ValueError if shapes differ.
    Source: arXiv:2305.20050 and arXiv:2312.08935 sec. 3.3; restricted and soft labels as OpenRLHF's PRMLoss.
    """
    if logprobs.shape != target.shape:
        raise ValueError(f"log-probabilities have shape {tuple(logprobs.shape)}, targets {tuple(target.shape)}")
    chosen = logprobs.log_softmax(dim=-1) if is_restricted else logprobs
    return -(target * chosen).sum(dim=-1)
