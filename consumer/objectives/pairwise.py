"""Optimise a reward model on pairs of responses, of which one is preferred (Bradley-Terry).

The model has a scalar head. Samples 2k and 2k + 1 are the preferred and the other response to a prompt, with one loss
token each: its source is the token whose value is the reward (see `coati_rl.reading.reward_samples`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coati_rl.algorithms.reward_model import bradley_terry_loss
from coati_rl.algorithms.sequences import unit_sums
from coati_rl.config.jobs.rm import RmJobConfig
from consumer.objectives.objective import SingleLoss, mean_of


@dataclass(frozen=True, kw_only=True)
class Pairwise(SingleLoss):
    """Average the Bradley-Terry loss over the pairs of the batch, which are complete.

    The batch has an array `margin`, of which the preferred response's counts.

    Reports, detached float64[] each and summed over pairs: num_pairs; loss_sum; correct_sum (r_c > r_r); margin_sum
    (r_c - r_r); chosen_sum and rejected_sum (rewards).
    """

    center_coefficient: float = 0.0  # weight of the penalty on (r_c + r_r)^2; 0: none
    unit = 2

    def __call__(
        self, values: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (float32[] summed loss, sums) for float32[R, M] values.

        Raises: ValueError if a sample of a pair has no loss token, or several.
        """
        # A blank micro-batch has no margins, and no pairs either.
        margin = micro_batch.get("margin", torch.zeros_like(values))
        rewards, margins, counts = unit_sums(
            micro_batch["loss_mask"], micro_batch["sample_index"], values, margin, torch.ones_like(values)
        )
        if bool((counts != 1).any()):
            raise ValueError(f"pairs need one loss token in each of their two samples, and have {counts.tolist()}")
        chosen, rejected = rewards.unbind(dim=1)  # float64[N]
        loss = bradley_terry_loss(chosen, rejected, margins[:, 0], center_coefficient=self.center_coefficient).sum()
        apart = (chosen - rejected).detach()
        return loss.to(values.dtype), {
            "num_pairs": torch.tensor(len(rewards), dtype=torch.float64, device=values.device),
            "loss_sum": loss.detach(),
            "correct_sum": (apart > 0).double().sum(),
            "margin_sum": apart.sum(),
            "chosen_sum": chosen.detach().sum(),
            "rejected_sum": rejected.detach().sum(),
        }

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return means over the step's pairs, under the names of `preference`; see docs/metrics.md."""
        return {
            "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
            "rewards/chosen": mean_of(sums, "chosen_sum", "num_pairs"),
            "rewards/rejected": mean_of(sums, "rejected_sum", "num_pairs"),
            "rewards/accuracies": mean_of(sums, "correct_sum", "num_pairs"),
            "rewards/margins": mean_of(sums, "margin_sum", "num_pairs"),
            "pairs": int(sums["num_pairs"]),
        }


def of_job(config: RmJobConfig, load_tokenizer: Callable[[], Any]) -> Pairwise:
    """Build the objective of a reward model's training."""
    return Pairwise(center_coefficient=config.objective.center_rewards_coefficient)
