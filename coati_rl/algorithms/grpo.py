"""GRPO's loss: the clipped surrogate plus a KL penalty to a reference model, summed with the micro-batch's weights.

Consumes the log-probabilities of one micro-batch and the tensors of its `MicroBatch`; produces one scalar to be summed
over micro-batches and ranks, and the sums to report (see `sums`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coati_rl.algorithms.kl import kl_terms
from coati_rl.algorithms.policy_loss import check_clip_bounds, clipped_policy_terms


@dataclass(frozen=True, kw_only=True, slots=True)
class GrpoLoss:
    """loss = sum_t w_t * (-min(r_t A_t, clip(r_t) A_t) + kl_coeff * k3_t); DAPO with clip_high > clip_low, kl_coeff 0.

    Reports, all detached float64[] and summed over loss tokens unless the name ends in `_max`; which keys there are
    depends on the settings alone, so that ranks can reduce them together:
        num_tokens; loss_sum (weighted, as returned); entropy_sum (nats); ratio_max;
        clip_sum: tokens whose gradient the clip has stopped;
        kl_sum: unweighted k3 in nats, only if kl_coeff > 0;
        gap_tokens, gap_sum, gap_max: tokens sampled by the trainer's own version, and |logprobs - rollout_logprobs|
        in nats on them. Engine and trainer should agree there; it is the first thing to look at when a run goes wrong.
    """

    is_token_separable: ClassVar[bool] = True  # see LossFn

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coeff: float = 0.0  # weight of the KL penalty; 0 needs no reference

    def __post_init__(self) -> None:
        check_clip_bounds(self.clip_low, self.clip_high)
        if not self.kl_coeff >= 0:
            raise ValueError(f"kl_coeff = {self.kl_coeff} must not be negative")

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The summed loss of one micro-batch.

        Args:
            logprobs: float32[R, L], log pi(token) in nats at the sampling temperature; carries gradient.
            entropy: float32[R, L], nats, no gradient.
            micro_batch: the arrays of `MicroBatch` as tensors, without those that are None (`rollout_logprobs` stand
                in for `old_logprobs`), and `trainer_version`, int64[]: the version of the weights that are trained.
        Returns: (float32[] summed loss, the sums to report).
        Raises: ValueError if kl_coeff > 0 and the batch has no ref_logprobs.
        Source: arXiv:2402.03300 eq. 3 and 4; arXiv:2503.14476 eq. 8.
        """
        loss_mask = micro_batch["loss_mask"]
        old_logprobs = micro_batch.get("old_logprobs", micro_batch["rollout_logprobs"])
        terms, ratio = clipped_policy_terms(
            logprobs,
            old_logprobs,
            micro_batch["advantages"],
            loss_mask,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        sums = {}
        if self.kl_coeff > 0:
            if "ref_logprobs" not in micro_batch:
                raise ValueError(f"kl_coeff = {self.kl_coeff} needs ref_logprobs: score the batch with a reference")
            kl = kl_terms(logprobs, micro_batch["ref_logprobs"], loss_mask)  # float32[R, L]
            terms = terms + self.kl_coeff * kl
            sums["kl_sum"] = kl.detach().double().sum()
        loss = (micro_batch["loss_weights"] * terms).sum()
        sums |= {
            "loss_sum": loss.detach().double(),
            "entropy_sum": torch.where(loss_mask, entropy.detach(), 0.0).double().sum(),
            "clip_sum": self._num_clipped(ratio, micro_batch["advantages"], loss_mask),
            "ratio_max": torch.where(loss_mask, ratio, 0.0).amax().double(),
            "num_tokens": loss_mask.sum().double(),
            **_gap_sums(logprobs.detach(), micro_batch),
        }
        return loss, sums

    def _num_clipped(self, ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
        """float64[]: tokens at which min() chose the clipped branch, and that branch is constant."""
        too_low = (advantages < 0) & (ratio < 1 - self.clip_low)
        too_high = (advantages > 0) & (ratio > 1 + self.clip_high)
        return ((too_low | too_high) & loss_mask).sum().double()


def _gap_sums(logprobs: Tensor, micro_batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Where trainer and engine hold the same weights, how far apart their log-probabilities are."""
    same_version = (micro_batch["policy_version"] == micro_batch["trainer_version"]) & micro_batch["loss_mask"]
    gap = torch.where(same_version, logprobs - micro_batch["rollout_logprobs"], 0.0).abs()  # float32[R, L], nats
    return {
        "gap_tokens": same_version.sum().double(),
        "gap_sum": gap.double().sum(),
        "gap_max": gap.amax().double(),
    }
