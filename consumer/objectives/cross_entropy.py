"""Optimise the cross-entropy of a dataset's tokens: supervised fine-tuning."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from consumer.objectives.objective import SingleLoss, mean_of

_MAX_EXPONENT = 80.0  # exp(80) is still a finite float32


class CrossEntropy(SingleLoss):
    """Average over all loss tokens of the batch, whatever sequence they are in.

    loss = sum_t w_t * -log p(token_t) over loss tokens; w_t are the batch's `loss_weights`.

    Reports, detached float64[] each and summed over loss tokens: num_tokens; loss_sum (weighted, as returned); nll_sum
    (unweighted, nats); entropy_sum (nats).
    """

    is_token_separable = True

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (float32[] summed loss, sums) for float32[R, M] log-probabilities."""
        loss_mask = micro_batch["loss_mask"]
        nll = -torch.where(loss_mask, logprobs, 0.0)  # masked before the product: padding may hold -inf
        loss = (micro_batch["loss_weights"] * nll).sum()
        return loss, {
            "num_tokens": loss_mask.sum().double(),
            "loss_sum": loss.detach().double(),
            "nll_sum": nll.detach().double().sum(),
            "entropy_sum": torch.where(loss_mask, entropy.detach(), 0.0).double().sum(),
        }

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return loss, perplexity (exp of the mean nll over tokens), mean entropy and the number of loss tokens."""
        nll = mean_of(sums, "nll_sum")
        return {
            "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
            "perplexity": None if nll is None else math.exp(min(nll, _MAX_EXPONENT)),
            "entropy_mean": mean_of(sums, "entropy_sum"),
            "loss_tokens": int(sums["num_tokens"]),
        }
