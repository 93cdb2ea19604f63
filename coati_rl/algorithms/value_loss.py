"""Compute the loss of a critic: its values against returns, clipped about the values that the returns were made of.

A sum over tokens with the weights of the policy's loss, without the global denominator; R rows, M loss tokens per row.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueLoss:
    """Compute loss = sum_t w_t * max(l(V_t - G_t), l(clip(V_t, old_t - c, old_t + c) - G_t)), l(x) = x^2 / 2.

    With `huber` d: l(x) = x^2 / 2 where |x| <= d, else d * (|x| - d / 2).

    Reports, detached float64[] and summed over loss tokens: value_tokens; value_loss_sum (weighted, as returned);
    value_clip_sum (tokens whose clipped term is the larger one); value_sum; return_sum and return_squares;
    residual_sum and residual_squares, of G_t - old_t, of which the explained variance is made.

    Source: arXiv:1707.06347 (PPO's code, baselines' `vpredclipped`), arXiv:2005.12729.
    """

    clip: float | None = None  # c; None: not clipped
    huber: float | None = None  # d; None: squared

    is_token_separable = True

    def is_final(self, sums: Mapping[str, Tensor]) -> bool:
        """See `LossFn`: True, no evaluation by tokens shows that a whole sample is needed."""
        return True

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (float32[] summed loss, sums). `logprobs`: float32[R, M], the critic's values, with gradient."""
        values, mask = logprobs, micro_batch["loss_mask"]
        none = torch.zeros_like(values)
        old, returns = micro_batch.get("old_values", none), micro_batch.get("returns", none)
        terms = self._terms(values - returns)
        clipped = terms
        if self.clip is not None:
            clipped = self._terms(old + (values - old).clamp(-self.clip, self.clip) - returns)
        terms, was_larger = torch.where(mask, torch.maximum(terms, clipped), 0.0), (clipped > terms) & mask
        loss = (micro_batch["loss_weights"] * terms).sum()
        counted = returns[mask].double()
        residuals = counted - old[mask].double()
        return loss, {
            "value_tokens": mask.sum().double(),
            "value_loss_sum": loss.detach().double(),
            "value_clip_sum": was_larger.sum().double(),
            "value_sum": values.detach()[mask].double().sum(),
            "return_sum": counted.sum(),
            "return_squares": counted.square().sum(),
            "residual_sum": residuals.sum(),
            "residual_squares": residuals.square().sum(),
        }

    def _terms(self, errors: Tensor) -> Tensor:
        if self.huber is None:
            return 0.5 * errors.square()
        size = errors.abs()
        return torch.where(size <= self.huber, 0.5 * size.square(), self.huber * (size - 0.5 * self.huber))


def value_metrics(sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
    """Return a critic's metrics from the sums over all ranks; None where a step has no tokens or no variance.

    explained_variance is 1 - Var(G - V) / Var(G), V before the update: 1 of a perfect critic, 0 of a constant one.
    """
    tokens = sums["value_tokens"]
    if not tokens:
        names = ("value_loss", "value_clip_fraction", "value_mean", "return_mean", "explained_variance")
        return dict.fromkeys(names)
    spread, left = (
        sums[f"{name}_squares"] / tokens - (sums[f"{name}_sum"] / tokens) ** 2 for name in ("return", "residual")
    )
    return {
        "value_loss": sums["value_loss_sum"] * loss_scale if loss_scale else None,
        "value_clip_fraction": sums["value_clip_sum"] / tokens,
        "value_mean": sums["value_sum"] / tokens,
        "return_mean": sums["return_sum"] / tokens,
        "explained_variance": 1 - left / spread if spread > 1e-12 else None,
    }
