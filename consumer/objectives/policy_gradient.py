"""Optimise the policy gradient (GRPO, DAPO and related algorithms) with the loss and targets that the config names.

Targets are advantages: KL to the reference is subtracted if it is part of the reward, the teacher's log-probabilities
are added in a distillation, and they are whitened over the step's loss tokens if `whiten_advantages` is set.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from coati_rl.algorithms.choices import KLEstimator
from coati_rl.algorithms.coefficients import Coefficients
from coati_rl.algorithms.distillation import add_teacher_advantages
from coati_rl.algorithms.loss import PolicyLoss
from coati_rl.algorithms.sums import merge_sums
from coati_rl.algorithms.token_advantages import advantage_sums, subtract_kl_to_go, whiten
from coati_rl.algorithms.token_selection import Reduce, SelectedTokens
from coati_rl.batch import MicroBatch
from coati_rl.config.control import ReferenceUpdate
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
    whitens: bool = False  # advantages are whitened over the step
    selection: SelectedTokens | None = None  # of tokens whose policy term differs; None: all are alike
    first_kl_coeff: float = 0.0  # weight of KL, wherever it acts, before it is adapted
    coefficients: Coefficients = field(default_factory=Coefficients)  # that change with the run
    reference_update: ReferenceUpdate | None = None  # None: the reference stays

    sample_arrays: ClassVar[tuple[str, ...]] = ("advantages", "rollout_logprobs", "policy_version")

    @property
    def needs_whole_step(self) -> bool:
        """Return True if tokens are compared with those of the whole step."""
        return self.whitens or self.selection is not None

    @property
    def keeps_old_policy(self) -> bool:
        """Return True if the old policy needs a copy, since it scores several batches."""
        return (self.old_policy_period or 1) > self.updates_per_batch

    @property
    def losses(self) -> Mapping[Role, LossFn]:
        """Return the policy's loss."""
        return {"policy": self.policy_loss}

    @property
    def policy_loss(self) -> LossFn:
        """Return the policy's loss with the coefficients of the coming step."""
        if isinstance(self.loss, DistilledLoss) and isinstance(self.loss.loss, PolicyLoss):
            return dataclasses.replace(self.loss, loss=self._adapted(self.loss.loss))
        return self._adapted(self.loss) if isinstance(self.loss, PolicyLoss) else self.loss

    def _adapted(self, loss: PolicyLoss) -> PolicyLoss:
        own = self.coefficients
        entropy_coeff = loss.entropy_coeff if own.entropy_control is None else own.applied_entropy_coeff
        return dataclasses.replace(loss, kl_coeff=loss.kl_coeff * own.kl_scale, entropy_coeff=entropy_coeff)

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

    @property
    def entropies(self) -> Mapping[str, Role]:
        """Return the old policy, if tokens are selected by their entropy."""
        if self.selection is None or self.selection.selection != "top_entropy":
            return {}
        return {"old_entropy": "old" if self.keeps_old_policy else "policy"}

    def targets(self, micro_batches: tuple[MicroBatch, ...]) -> Targets:
        """Subtract KL to the reference and add the teacher's term, where they are part of the advantages."""
        changed, sums = [], dict[str, Tensor]()
        for micro_batch in micro_batches:
            done, terms = self._with_advantages(micro_batch)
            if self.coefficients.kl_control is not None:
                terms = {**terms, "num_trajectories": _num_samples(micro_batch)}
            changed.append(done)
            sums = merge_sums(sums, terms)
        return tuple(changed), sums

    def _with_advantages(self, micro_batch: MicroBatch) -> tuple[MicroBatch, dict[str, Tensor]]:
        sums: dict[str, Tensor] = {}
        if self.distills_only:
            micro_batch = micro_batch.with_arrays(advantages=np.zeros_like(micro_batch.loss_arrays["advantages"]))
        if self.reward_kl_coeff > 0:
            micro_batch, sums = subtract_kl_to_go(
                micro_batch,
                kl_coeff=self.reward_kl_coeff * self.coefficients.kl_scale,
                estimator=self.kl_estimator,
                clamp=self.kl_clamp,
            )
        if self.teacher_coeff is not None:
            micro_batch, terms = add_teacher_advantages(micro_batch, coeff=self.teacher_coeff)
            sums = sums | terms
        return micro_batch, sums

    def with_whole_step(self, micro_batches: Sequence[MicroBatch], reduce: Reduce) -> Sequence[MicroBatch]:
        """Whiten advantages, and mark the tokens that are selected."""
        if self.whitens and (sums := reduce(advantage_sums(micro_batches))):
            micro_batches = [whiten(micro_batch, sums) for micro_batch in micro_batches]
        return micro_batches if self.selection is None else self.selection(micro_batches, reduce)

    def end_step(self, sums: Mapping[str, float]) -> None:
        """Adapt the coefficients."""
        self.coefficients.end_step(
            kl=mean_of(sums, "kl_sum"),
            num_samples=sums.get("num_trajectories", 0.0),
            entropy=mean_of(sums, "entropy_sum"),
        )

    def state(self) -> dict[str, Any]:
        """Return the coefficients."""
        return self.coefficients.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with a checkpoint's coefficients."""
        self.coefficients.restore(state)

    def reference_mix(self, step: int) -> float:
        """Return what `reference_update` says for a step."""
        update = self.reference_update
        return 0.0 if update is None or (step + 1) % update.interval else update.mix

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return means over the step's loss tokens; see docs/metrics.md."""
        squares = mean_of(sums, "rounding_squares", "rounding_tokens")
        is_rescored, own = self.old_policy_period is not None, self.coefficients
        return {
            "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
            "kl_mean": mean_of(sums, "kl_sum"),
            "teacher_kl_mean": mean_of(sums, "teacher_kl_sum"),
            "entropy_mean": mean_of(sums, "entropy_sum"),
            "kl_coeff": self.first_kl_coeff * own.kl_scale if own.kl_control is not None else None,
            "entropy_coeff": own.applied_entropy_coeff if own.entropy_control is not None else None,
            "clip_fraction": mean_of(sums, "clip_sum"),
            "ratio_max": sums["ratio_max"],
            "samples_skipped": sums.get("skipped_samples"),
            "masked_token_fraction": mean_of(sums, "drifted_tokens"),
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


def _num_samples(micro_batch: MicroBatch) -> Tensor:
    """Return float64[], the samples with a loss token."""
    found = np.unique(micro_batch.loss_arrays["sample_index"][micro_batch.loss_arrays["loss_mask"]])
    return torch.tensor(float(len(found)), dtype=torch.float64)
