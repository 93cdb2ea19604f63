"""Compute advantages and returns of tokens from their rewards and a critic's values (GAE), per sample.

The tokens of a sample in the loss are its steps, one after another; what stands between them (a tool's answer) is part
of the next one's state and no step of its own. All sums are float64. R rows, M loss tokens per row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coati_rl.algorithms.choices import KLEstimator
from coati_rl.algorithms.token_advantages import sample_parts, token_kl
from coati_rl.batch import MicroBatch

Values = NDArray[np.float64]


def generalised_advantages(
    rewards: Values, values: Values, *, discount: float, trace: float, is_cut: bool = False
) -> Values:
    """Compute A_t = sum over s >= t of (discount * trace)^(s - t) * (r_s + discount * V_(s+1) - V_s) of one sample.

    Args:
        rewards: float64[N], r_t of each token.
        values: float64[N], V_t of the state before each token.
        discount: gamma, 0 to 1.
        trace: lambda, 0 to 1; with 1 A_t is the discounted sum of rewards less V_t.
        is_cut: the sample was cut by a limit, which is no end: V of the state after its last token is taken to be that
            before it. Else it is 0.
    Returns: float64[N].
    Source: arXiv:1506.02438 eq. 16; a cut is no end: arXiv:1712.00378.
    """
    after = np.append(values[1:], values[-1:] if is_cut else 0.0)
    advantages = rewards + discount * after - values
    for token in range(len(advantages) - 2, -1, -1):
        advantages[token] += discount * trace * advantages[token + 1]
    return advantages


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenReturns:
    """Add `advantages` and `returns` to micro-batches that hold token_rewards, is_cut and old_values."""

    discount: float = 1.0  # gamma
    trace: float = 0.95  # lambda of the advantages
    critic_trace: float | None = None  # lambda of the returns that the critic learns; None: that of the advantages
    # Length-adaptive lambda of the advantages of a sample of N tokens: 1 - 1 / (this * N); None: `trace`.
    trace_by_length: float | None = None
    kl_coeff: float = 0.0  # weight of KL to the reference in the reward of each token; 0: none
    kl_estimator: KLEstimator = "k1"
    kl_clamp: float | None = None

    def trace_of(self, num_tokens: int) -> float:
        """Return lambda of the advantages of a sample. Source: arXiv:2504.05118 (VAPO)."""
        if self.trace_by_length is None:
            return self.trace
        return max(0.0, 1.0 - 1.0 / (self.trace_by_length * num_tokens))

    def __call__(self, micro_batch: MicroBatch) -> tuple[MicroBatch, dict[str, Tensor]]:
        """Return the micro-batch with both arrays, and {"kl_sum": float64[]} with KL in the reward.

        Returns are A_t + V_t with the critic's lambda; V_t are old_values, and carry no gradient. The last return of a
        sample that was cut is V_t: its value stands in for that of the state after it, and would run after itself.
        """
        arrays = micro_batch.loss_arrays
        mask, values = arrays["loss_mask"], arrays["old_values"].astype(np.float64)
        rewards, sums = arrays["token_rewards"].astype(np.float64), dict[str, Tensor]()
        if self.kl_coeff > 0:
            kl = token_kl(micro_batch, estimator=self.kl_estimator, clamp=self.kl_clamp)
            rewards -= self.kl_coeff * kl
            sums["kl_sum"] = torch.tensor(kl.sum())
        advantages, returns = np.zeros_like(values), np.zeros_like(values)
        for row, part in sample_parts(arrays["sample_index"]):
            places = part.start + np.flatnonzero(mask[row, part])
            if not len(places):
                continue
            is_cut, trace = bool(arrays["is_cut"][row, places[-1]]), self.trace_of(len(places))
            of_sample = rewards[row, places], values[row, places]
            found = generalised_advantages(*of_sample, discount=self.discount, trace=trace, is_cut=is_cut)
            advantages[row, places] = returns[row, places] = found
            if (critic := self.trace if self.critic_trace is None else self.critic_trace) != trace:
                found = generalised_advantages(*of_sample, discount=self.discount, trace=critic, is_cut=is_cut)
                returns[row, places] = found
            if is_cut:
                returns[row, places[-1]] = 0.0
        returns = np.where(mask, returns + values, 0.0)
        return micro_batch.with_arrays(
            advantages=advantages.astype(np.float32), returns=returns.astype(np.float32)
        ), sums
