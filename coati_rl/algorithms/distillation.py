"""Add a teacher's log-probabilities of the sampled tokens to their advantages: on-policy distillation.

R rows, M loss tokens per row. All sums are float64.
"""

import numpy as np
import torch
from torch import Tensor

from coati_rl.batch import MicroBatch


def add_teacher_advantages(micro_batch: MicroBatch, *, coeff: float) -> tuple[MicroBatch, dict[str, Tensor]]:
    """Compute A_t + coeff * (log p_teacher - log p_old) of each sampled token: the reverse KL to the teacher as reward.

    log p_old - log p_teacher of a token drawn from the old policy is an unbiased estimate of the reverse KL
    KL(policy || teacher) at its place. Each token answers for its own place alone: there is no sum over later tokens.

    Args:
        micro_batch: with teacher_logprobs; rollout_logprobs stand in for old_logprobs.
        coeff: weight of the estimate.
    Returns: (the micro-batch with new advantages, {"teacher_kl_sum": float64[], the estimates over loss tokens,
        unweighted, nats}).
    Raises: ValueError if the micro-batch has no teacher_logprobs.
    Source: "On-Policy Distillation", Thinking Machines (2025), with its discount of 0; the objective is that of
        arXiv:2306.08543 (MiniLLM), whose gradient also counts later tokens, and of arXiv:2306.13649 (GKD).
    """
    arrays = micro_batch.loss_arrays
    if "teacher_logprobs" not in arrays:
        raise ValueError("distillation needs teacher_logprobs: score the batch with a teacher")
    old, loss_mask = arrays.get("old_logprobs", arrays["rollout_logprobs"]), arrays["loss_mask"]
    kl = np.zeros(loss_mask.shape)
    np.subtract(old, arrays["teacher_logprobs"], out=kl, where=loss_mask)
    advantages = arrays["advantages"]
    changed = np.where(loss_mask, advantages - coeff * kl, advantages).astype(np.float32)
    return micro_batch.with_arrays(advantages=changed), {"teacher_kl_sum": torch.tensor(kl.sum())}
