"""Define a loss that uses all its arguments, entropies included."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """sum_t w_t * (-min(r_t A_t, clip(r_t) A_t) + kl_coeff * k3_t - entropy_coeff * H_t)."""

    is_token_separable: ClassVar[bool] = True

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coeff: float = 0.1
    entropy_coeff: float = 0.5  # 0: only the detached entropy is used, for the report

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, tensors: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        mask, advantages = tensors["loss_mask"], tensors["advantages"]
        ratio = torch.where(mask, logprobs - tensors["old_logprobs"], 0.0).exp()
        gap = torch.where(mask, tensors["ref_logprobs"] - logprobs, 0.0)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        terms = -torch.minimum(ratio * advantages, clipped * advantages)
        terms = terms + self.kl_coeff * (gap.exp() - gap - 1)
        if self.entropy_coeff > 0:
            terms = terms - self.entropy_coeff * entropy
        loss = torch.where(mask, tensors["loss_weights"] * terms, 0.0).sum()
        sums = {
            "num_tokens": mask.sum(),
            "loss_sum": loss,
            "entropy_sum": torch.where(mask, entropy.detach(), 0.0).sum(),
            "clip_sum": (mask & (ratio != clipped)).sum(),
            "ratio_max": torch.where(mask, ratio, 0.0).amax(),
        }
        return loss, {name: value.detach().double() for name, value in sums.items()}
