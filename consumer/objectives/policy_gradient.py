"""Optimise the policy gradient (GRPO, DAPO and related algorithms) with the loss and targets that the config names.

Targets are advantages: KL to the reference is subtracted if it is part of the reward, the teacher's log-probabilities
are added in a distillation, and they are whitened over the step's loss tokens if `whiten_advantages` is set.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from coati_rl.algorithms.choices import KLEstimator
from coati_rl.algorithms.distillation import add_teacher_advantages
from coati_rl.algorithms.sums import merge_sums
from coati_rl.algorithms.token_advantages import advantage_sums, subtract_kl_to_go, whiten
from coati_rl.batch import MicroBatch
from coati_rl.ops.distilled_loss import DistilledLoss
from coati_rl.protocols import LossFn, Role
from consumer.objectives.objective import Objective, Targets, mean_of


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """Compute the targets of a policy gradient; the loss is `coati_rl.algorithms.loss.PolicyLoss`."""

    loss: LossFn
    has_reference: bool = False
    old_policy_period: int | None = None  # optimizer steps that one old policy serves; None: not recomputed
    updates_per_batch: int = 1
    reward_kl_coeff: float = 0.0  # weight of KL in the reward; 0: none
    kl_estimator: KLEstimator = "k3"
    kl_clamp: float | None = None
    teacher_coeff: float | None = None  # weight of the reverse KL to the teacher in the advantages; None: not there
    distills_only: bool = False  # the rewards' advantages count as 0
    needs_whole_step: bool = False  # advantages are whitened over the step

    @property
    def keeps_old_policy(self) -> bool:
        """Return True if the old policy needs a copy, since it scores several batches."""
        return (self.old_policy_period or 1) > self.updates_per_batch

    @property
    def losses(self) -> Mapping[Role, LossFn]:
        """Return the policy's loss."""
        return {"policy": self.loss}

    @property
    def scores(self) -> Mapping[str, Role]:
        """Return the models that compute old_logprobs, ref_logprobs and teacher_logprobs."""
        scores: dict[str, Role] = {}
        if self.old_policy_period is not None:
            scores["old_logprobs"] = "old" if self.keeps_old_policy else "policy"
        if self.has_reference:
            scores["ref_logprobs"] = "reference"
        if self.teacher_coeff is not None:
            scores["teacher_logprobs"] = "teacher"
        return scores

    @property
    def hidden_states(self) -> Mapping[str, Role]:
        """Return the teacher, if the loss compares whole distributions with it."""
        return {"teacher_hidden": "teacher"} if isinstance(self.loss, DistilledLoss) else {}

    def targets(self, micro_batches: tuple[MicroBatch, ...]) -> Targets:
        """Subtract KL to the reference and add the teacher's term, where they are part of the advantages."""
        changed, sums = [], dict[str, Tensor]()
        for micro_batch in micro_batches:
            done, terms = self._with_advantages(micro_batch)
            changed.append(done)
            sums = merge_sums(sums, terms)
        return tuple(changed), sums

    def _with_advantages(self, micro_batch: MicroBatch) -> tuple[MicroBatch, dict[str, Tensor]]:
        sums: dict[str, Tensor] = {}
        if self.distills_only:
            micro_batch = micro_batch.with_arrays(advantages=np.zeros_like(micro_batch.loss_arrays["advantages"]))
        if self.reward_kl_coeff > 0:
            micro_batch, sums = subtract_kl_to_go(
                micro_batch, kl_coeff=self.reward_kl_coeff, estimator=self.kl_estimator, clamp=self.kl_clamp
            )
        if self.teacher_coeff is not None:
            micro_batch, terms = add_teacher_advantages(micro_batch, coeff=self.teacher_coeff)
            sums = sums | terms
        return micro_batch, sums

    def step_sums(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Sum advantages over loss tokens."""
        return advantage_sums(micro_batches)

    def with_step_sums(self, micro_batch: MicroBatch, sums: Mapping[str, float]) -> MicroBatch:
        """Whiten advantages."""
        return whiten(micro_batch, sums)

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return means over the step's loss tokens; see docs/metrics.md."""
        squares = mean_of(sums, "rounding_squares", "rounding_tokens")
        is_rescored = self.old_policy_period is not None
        return {
            "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
            "kl_mean": mean_of(sums, "kl_sum"),
            "teacher_kl_mean": mean_of(sums, "teacher_kl_sum"),
            "entropy_mean": mean_of(sums, "entropy_sum"),
            "clip_fraction": mean_of(sums, "clip_sum"),
            "ratio_max": sums["ratio_max"],
            "samples_skipped": sums.get("skipped_samples"),
            "correction_mean": mean_of(sums, "correction_sum"),
            "correction_dropped_fraction": mean_of(sums, "correction_dropped"),
            "logprob_gap_mean": mean_of(sums, "gap_sum", "gap_tokens"),
            "logprob_gap_max": sums["gap_max"] if sums["gap_tokens"] else None,
            "logprob_gap_tokens": int(sums["gap_tokens"]),
            "logprob_rounding_mean": mean_of(sums, "rounding_sum", "rounding_tokens"),
            "logprob_rounding_rms": None if squares is None else math.sqrt(squares),
            "logprob_rounding_tokens": int(sums.get("rounding_tokens", 0)),
            "logprob_shift_mean": mean_of(sums, "rounding_shift", "rounding_tokens"),
            "old_logprob_gap_mean": mean_of(sums, "old_gap_sum") if is_rescored else None,
            "old_logprob_gap_max": sums["old_gap_max"] if is_rescored else None,
        }
