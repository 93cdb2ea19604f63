"""Compute the loss of every algorithm: a policy term per token, corrected, penalised, masked, then weighted and summed.

Consumes the log-probabilities of one micro-batch and the tensors of its `MicroBatch`; produces one scalar to be summed
over micro-batches and ranks, and the sums to report (see `sums`). R rows, M loss tokens per row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from coati_rl.algorithms.choices import (
    LOSSES_OF_SEQUENCES,
    OF_SEQUENCES,
    POLICY_LOSSES,
    Correction,
    KLEstimator,
    RatioLevel,
)
from coati_rl.algorithms.kl import kl_terms
from coati_rl.algorithms.off_policy import correction_weights, drifted_tokens
from coati_rl.algorithms.policy_loss import (
    ClipBounds,
    check_bounds,
    cispo_terms,
    clipped_policy_terms,
    clipped_tokens,
    gmpo_terms,
    sapo_terms,
    vespo_terms,
)
from coati_rl.algorithms.ratio import count_samples, masked_log_ratio, ratio_of, sample_any, sample_mean

# (logprobs, old_logprobs, advantages, all arrays of the micro-batch) to the terms, all float32[R, M]
TermsFn = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyLoss:
    """Compute loss = sum_t w_t * keep_t * (c_t * policy_term_t + kl_coeff * kl_t - entropy_coeff * H_t).

    w_t are the micro-batch's weights (the aggregation), c_t the off-policy correction, keep_t is 0 on samples whose
    largest ratio exceeds `skip_threshold`. The policy term is 0 on tokens that the micro-batch's `left_out` marks, and
    on samples that `drift_threshold` leaves out; tokens that `held` marks have hold_coeff * |log r_t| besides.

    Reports, all detached float64[] and summed over loss tokens unless the name ends in `_max`; the keys depend on the
    settings alone, so that ranks can reduce them together:
        num_tokens; loss_sum (weighted, as returned); entropy_sum (nats); ratio_max;
        clip_sum: tokens whose gradient is clipped to 0, or under "cispo" whose weight is clipped, or under "gmpo" whose
            part of the mean is; 0 under "sapo" and "vespo";
        kl_sum: unweighted, nats, only if kl_coeff > 0;
        skipped_samples: only with a threshold;
        drifted_tokens: those of samples that `drift_threshold` leaves out, only with it;
        correction_sum, correction_dropped: the weights c_t, and the number of those that are 0, only with a correction;
        gap_tokens, gap_sum, gap_max: tokens sampled by the trainer's own version, and |logprobs - rollout_logprobs|
        in nats on them: the training-inference mismatch, which should be small;
        old_gap_sum, old_gap_max: |old_logprobs - rollout_logprobs| on all tokens, which includes the difference of
        policy versions; 0 where rollout_logprobs stand in.
    """

    policy_loss: str = "clip"  # one of POLICY_LOSSES; not used with `terms_fn`
    ratio_level: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.2
    clip_dual: float | None = None
    sapo_positive: float = 1.0  # tau of "sapo" where the advantage is above 0
    sapo_negative: float = 1.05  # elsewhere
    vespo_positive: tuple[float, float] = (2.0, 3.0)  # k and lambda of "vespo" where the advantage is not negative
    vespo_negative: tuple[float, float] = (3.0, 2.0)  # elsewhere
    kl_coeff: float = 0.0  # weight of the KL penalty in the loss; 0 needs no reference
    kl_estimator: KLEstimator = "k3"
    kl_clamp: float | None = None  # bound of a token's estimate, nats; None: no bound
    kl_has_ratio: bool = False  # weigh the KL penalty by r_t, whose gradient counts: arXiv:2512.02556
    entropy_coeff: float = 0.0
    hold_coeff: float = 0.0  # weight of |log r_t| on tokens that are held: KL-Cov, arXiv:2505.22617
    correction: Correction = "none"
    correction_low: float = 0.0
    correction_high: float = 2.0
    skip_threshold: float | None = None
    drift_threshold: float | None = None  # see `drifted_tokens`, nats; None: no sample is left out
    terms_fn: TermsFn | None = None  # a user's policy term

    def __post_init__(self) -> None:
        check_bounds(self.clip_low, self.clip_high, self.clip_dual)
        for name in ("kl_coeff", "entropy_coeff"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if self.skip_threshold is not None and not self.skip_threshold > 1:
            raise ValueError(f"skip_threshold = {self.skip_threshold} must be above 1, the ratio of equal policies")
        if self.terms_fn is None and self.policy_loss not in POLICY_LOSSES:
            raise ValueError(f"policy loss {self.policy_loss!r} is unknown; use {' or '.join(POLICY_LOSSES)}")
        if self.ratio_level not in get_args(RatioLevel):
            raise ValueError(f"ratio level {self.ratio_level!r} is unknown; use {' or '.join(get_args(RatioLevel))}")

    @property
    def is_token_separable(self) -> bool:
        """See LossFn. Skipping samples needs whole samples only if a ratio exceeds the threshold, see `is_final`."""
        are_terms = self.terms_fn is None or bool(getattr(self.terms_fn, "is_token_separable", False))
        return (
            are_terms
            and self.ratio_level == "token"
            and self.correction not in OF_SEQUENCES
            and self.policy_loss not in LOSSES_OF_SEQUENCES
            and self.drift_threshold is None
        )

    def is_final(self, sums: Mapping[str, Tensor]) -> bool:
        """See LossFn: return False if a ratio exceeds the threshold, so that its sample has to be skipped."""
        return self.skip_threshold is None or bool(sums["ratio_max"] <= self.skip_threshold)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the summed loss of one micro-batch.

        Args:
            logprobs: float32[R, M], log pi(token) in nats at the sampling temperature; carries gradient.
            entropy: float32[R, M], nats; carries gradient.
            micro_batch: the arrays of `MicroBatch` as tensors, without those that are None (`rollout_logprobs` stand
                in for `old_logprobs`), and `trainer_version`, int64[]: the policy version that is trained.
                Without `sample_index` it holds tokens and not whole samples, for a loss that is separable by token.
        Returns: (float32[] summed loss, the sums to report).
        Raises: ValueError if kl_coeff > 0 and the batch has no ref_logprobs.
        Source: docs/algorithms.md names the paper of each part.
        """
        loss_mask = micro_batch["loss_mask"]
        old_logprobs = micro_batch.get("old_logprobs", micro_batch["rollout_logprobs"])
        log_ratio = masked_log_ratio(logprobs, old_logprobs, loss_mask)
        if self.ratio_level == "sequence":
            log_ratio = sample_mean(log_ratio, loss_mask, micro_batch["sample_index"])
        terms, is_clipped = self._policy_terms(logprobs, log_ratio, micro_batch)
        sums = _gap_sums(logprobs.detach(), old_logprobs, micro_batch)
        if self.drift_threshold is not None:
            is_left_out = self._drifted(logprobs, micro_batch, self.drift_threshold)
            terms = torch.where(is_left_out, 0.0, terms)
            sums["drifted_tokens"] = is_left_out.sum().double()
        if "left_out" in micro_batch:
            terms = torch.where(micro_batch["left_out"], 0.0, terms)
        if "held" in micro_batch:
            terms = terms + torch.where(micro_batch["held"], self.hold_coeff * log_ratio.abs(), 0.0)
        if self.correction != "none":
            weights = self._correction(old_logprobs, micro_batch)
            terms = terms * weights
            sums["correction_sum"] = torch.where(loss_mask, weights, 0.0).double().sum()
            sums["correction_dropped"] = ((weights == 0) & loss_mask).sum().double()
        if self.kl_coeff > 0:
            kl = self._kl(logprobs, micro_batch)
            terms = terms + self.kl_coeff * (kl * ratio_of(log_ratio) if self.kl_has_ratio else kl)
            sums["kl_sum"] = kl.detach().double().sum()
        if self.entropy_coeff > 0:
            terms = terms - self.entropy_coeff * torch.where(loss_mask, entropy, 0.0)
        if self.skip_threshold is not None:
            is_kept, sums["skipped_samples"] = self._kept(log_ratio, micro_batch)
            terms = torch.where(is_kept, terms, 0.0)
        loss = (micro_batch["loss_weights"] * terms).sum()
        sums |= {
            "loss_sum": loss.detach().double(),
            "entropy_sum": torch.where(loss_mask, entropy.detach(), 0.0).double().sum(),
            "clip_sum": is_clipped.sum().double(),
            "ratio_max": torch.where(loss_mask, ratio_of(log_ratio.detach()), 0.0).amax().double(),
            "num_tokens": loss_mask.sum().double(),
        }
        return loss, sums

    def _policy_terms(
        self, logprobs: Tensor, log_ratio: Tensor, micro_batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return float32[R, M] terms, and bool[R, M] tokens that are clipped."""
        advantages, loss_mask = micro_batch["advantages"], micro_batch["loss_mask"]
        arrays, none = (log_ratio, advantages, loss_mask), torch.zeros_like(loss_mask)
        low, high = self.clip_low, self.clip_high
        if self.terms_fn is not None:
            return self._users_terms(self.terms_fn, logprobs, micro_batch), none
        if self.policy_loss == "cispo":
            ratio = ratio_of(log_ratio.detach())
            is_clipped = ((ratio < 1 - low) | (ratio > 1 + high)) & loss_mask
            return cispo_terms(logprobs, *arrays, clip_low=low, clip_high=high), is_clipped
        if self.policy_loss == "sapo":
            return sapo_terms(*arrays, positive=self.sapo_positive, negative=self.sapo_negative), none
        if self.policy_loss == "gmpo":
            return gmpo_terms(*arrays, micro_batch["sample_index"], clip_low=low, clip_high=high)
        if self.policy_loss == "vespo":
            positive, negative, index = self.vespo_positive, self.vespo_negative, micro_batch["sample_index"]
            return vespo_terms(logprobs, *arrays, index, positive=positive, negative=negative), none
        bounds = ClipBounds(clip_low=low, clip_high=high, clip_dual=self.clip_dual)
        return clipped_policy_terms(*arrays, **bounds), clipped_tokens(*arrays, **bounds)

    def _users_terms(self, terms_fn: TermsFn, logprobs: Tensor, micro_batch: Mapping[str, Tensor]) -> Tensor:
        loss_mask = micro_batch["loss_mask"]
        old_logprobs = micro_batch.get("old_logprobs", micro_batch["rollout_logprobs"])
        terms = terms_fn(logprobs, old_logprobs, micro_batch["advantages"], micro_batch)
        if terms.shape != loss_mask.shape:
            raise ValueError(f"policy terms have shape {tuple(terms.shape)}, tokens {tuple(loss_mask.shape)}")
        return torch.where(loss_mask, terms, 0.0)

    def _drifted(self, logprobs: Tensor, micro_batch: Mapping[str, Tensor], threshold: float) -> Tensor:
        return drifted_tokens(
            logprobs,
            micro_batch["rollout_logprobs"],
            micro_batch["advantages"],
            micro_batch["loss_mask"],
            micro_batch["sample_index"],
            threshold=threshold,
        )

    def _correction(self, old_logprobs: Tensor, micro_batch: Mapping[str, Tensor]) -> Tensor:
        return correction_weights(
            old_logprobs,
            micro_batch["rollout_logprobs"],
            micro_batch["loss_mask"],
            micro_batch.get("sample_index"),
            correction=self.correction,
            low=self.correction_low,
            high=self.correction_high,
        )

    def _kl(self, logprobs: Tensor, micro_batch: Mapping[str, Tensor]) -> Tensor:
        if "ref_logprobs" not in micro_batch:
            raise ValueError(f"kl_coeff = {self.kl_coeff} needs ref_logprobs: score the batch with a reference")
        return kl_terms(
            logprobs,
            micro_batch["ref_logprobs"],
            micro_batch["loss_mask"],
            estimator=self.kl_estimator,
            clamp=self.kl_clamp,
        )

    def _kept(self, log_ratio: Tensor, micro_batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return bool[R, M] tokens of samples that are not skipped, and float64[] the number of skipped samples."""
        loss_mask, sample_index = micro_batch["loss_mask"], micro_batch.get("sample_index")
        if sample_index is None or self.skip_threshold is None:  # by tokens: `is_final` requests another evaluation
            return loss_mask, loss_mask.new_zeros((), dtype=torch.float64)
        too_large = (ratio_of(log_ratio.detach()) > self.skip_threshold) & loss_mask
        is_skipped = sample_any(too_large, sample_index)
        return ~is_skipped, count_samples(is_skipped & loss_mask, sample_index)


def _gap_sums(logprobs: Tensor, old_logprobs: Tensor, micro_batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sum |difference| of trainer and engine log-probabilities: of the same policy version, and of all tokens."""
    loss_mask, rollout_logprobs = micro_batch["loss_mask"], micro_batch["rollout_logprobs"]
    same_version = (micro_batch["policy_version"] == micro_batch["trainer_version"]) & loss_mask
    gap = torch.where(same_version, logprobs - rollout_logprobs, 0.0).abs()  # float32[R, M], nats
    old_gap = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0).abs()
    return {
        "gap_tokens": same_version.sum().double(),
        "gap_sum": gap.double().sum(),
        "gap_max": gap.amax().double(),
        "old_gap_sum": old_gap.double().sum(),
        "old_gap_max": old_gap.amax().double(),
    }
