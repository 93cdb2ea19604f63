"""Optimise the policy gradient: GRPO, DAPO and their relatives, by what the configuration says of the algorithm.

Targets are advantages: KL to the reference is taken off them, if it is part of the reward, and they are whitened over
the step's loss tokens, if asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from coati_rl.algorithms.choices import KLEstimator
from coati_rl.algorithms.sums import merge_sums
from coati_rl.algorithms.token_advantages import advantage_sums, subtract_kl_to_go, whiten
from coati_rl.batch import MicroBatch
from coati_rl.build import build_loss
from coati_rl.config import Config
from coati_rl.protocols import LossFn, Role
from consumer.objectives.objective import Objective, Targets, mean_of


@dataclass(frozen=True, kw_only=True)
class PolicyGradient(Objective):
    """Describe the targets; the loss is `coati_rl.algorithms.loss.PolicyLoss`."""

    loss_fn: LossFn
    has_reference: bool = False
    old_policy_period: int | None = None  # recompute old_logprobs, with weights of so many steps; None: do not
    reward_kl_coeff: float = 0.0  # KL in the reward; 0: there is none
    kl_estimator: KLEstimator = "k3"
    kl_clamp: float | None = None
    needs_whole_step: bool = False  # advantages are whitened over the step

    @property
    def keeps_old_policy(self) -> bool:
        """True if the policy before the update is not the one that the step begins with."""
        return (self.old_policy_period or 1) > 1

    @property
    def scores(self) -> Mapping[str, Role]:  # type: ignore[override]
        """Return who scores old_logprobs and ref_logprobs."""
        scores: dict[str, Role] = {}
        if self.old_policy_period is not None:
            scores["old_logprobs"] = "old" if self.keeps_old_policy else "policy"
        return scores | ({"ref_logprobs": "reference"} if self.has_reference else {})

    def targets(self, micro_batches: tuple[MicroBatch, ...]) -> Targets:
        """Take KL to the reference off the advantages, if it is part of the reward."""
        if self.reward_kl_coeff == 0:
            return micro_batches, {}
        changed, sums = [], dict[str, Tensor]()
        for micro_batch in micro_batches:
            done, terms = subtract_kl_to_go(
                micro_batch, kl_coeff=self.reward_kl_coeff, estimator=self.kl_estimator, clamp=self.kl_clamp
            )
            changed.append(done)
            sums = merge_sums(sums, terms)
        return tuple(changed), sums

    def step_sums(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Sum advantages over loss tokens."""
        return advantage_sums(micro_batches)

    def with_step_sums(self, micro_batch: MicroBatch, sums: Mapping[str, float]) -> MicroBatch:
        """Whiten advantages."""
        return whiten(micro_batch, sums)

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Form means over the step's loss tokens; see docs/metrics.md."""
        is_rescored = self.old_policy_period is not None
        return {
            "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
            "kl_mean": mean_of(sums, "kl_sum"),
            "entropy_mean": mean_of(sums, "entropy_sum"),
            "clip_fraction": mean_of(sums, "clip_sum"),
            "ratio_max": sums["ratio_max"],
            "samples_skipped": sums.get("skipped_samples"),
            "correction_mean": mean_of(sums, "correction_sum"),
            "correction_dropped_fraction": mean_of(sums, "correction_dropped"),
            "logprob_gap_mean": mean_of(sums, "gap_sum", "gap_tokens"),
            "logprob_gap_max": sums["gap_max"] if sums["gap_tokens"] else None,
            "logprob_gap_tokens": int(sums["gap_tokens"]),
            "old_logprob_gap_mean": mean_of(sums, "old_gap_sum") if is_rescored else None,
            "old_logprob_gap_max": sums["old_gap_max"] if is_rescored else None,
        }


def policy_gradient(config: Config) -> PolicyGradient:
    """Return the objective of a checked config. Raises: ConfigError if a user's loss fails."""
    algorithm = config.algorithm
    return PolicyGradient(
        loss_fn=build_loss(algorithm),
        has_reference=algorithm.kl_coeff > 0,
        old_policy_period=config.sync_period if config.recomputes_old_logprobs else None,
        reward_kl_coeff=algorithm.kl_coeff if algorithm.kl_place == "reward" else 0.0,
        kl_estimator=algorithm.kl_estimator,
        kl_clamp=algorithm.kl_clamp,
        needs_whole_step=algorithm.whiten_advantages,
    )
