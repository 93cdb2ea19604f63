"""Optimise preferences between two completions of a prompt: DPO, cDPO, robust DPO, IPO, SimPO, ORPO.

A pair is a unit of two samples, the chosen one first. R rows, M loss tokens per row, P pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.algorithms.choices import WITH_LABEL_SMOOTHING, WITH_REFERENCE, PreferenceLoss
from coati_rl.algorithms.preference import (
    check_beta,
    check_label_smoothing,
    dpo_terms,
    ipo_terms,
    odds_ratio_terms,
    robust_dpo_terms,
    simpo_terms,
)
from coati_rl.algorithms.sequences import unit_sums
from coati_rl.batch import MicroBatch
from coati_rl.config.jobs.dpo import DpoJobConfig
from coati_rl.protocols import Role
from consumer.objectives.completion_metrics import completion_metrics
from consumer.objectives.objective import SingleLoss, Targets, mean_of

_SIMPO_BETA = 2.0  # the paper's lowest; rewards are of means over tokens, and so smaller than DPO's


@dataclass(frozen=True, kw_only=True)
class Preference(SingleLoss):
    """Average a loss of pairs over the pairs of the global batch.

    loss = sum over pairs of the loss's term + nll_coeff * nll, with nll the mean of -log pi(chosen token).
    Under "orpo" the term is nll + orpo_lambda * the odds ratio penalty. `loss_weights` of tokens are not read.
    nll_coeff above 0 is RPO's, arXiv:2404.19733 eq. 1.

    Reports, detached float64[] each, summed over pairs unless said: num_pairs; loss_sum (as returned); nll_sum (mean
    over tokens of -log pi(chosen), nats); chosen_reward_sum, rejected_reward_sum, correct_pairs (see `_rewards`);
    chosen_logprob_sum, rejected_logprob_sum (nats; mean per token under "simpo" and "orpo"); num_tokens; entropy_sum
    (nats, over tokens).
    """

    loss: PreferenceLoss = "dpo"
    beta: float = 0.1
    label_smoothing: float = 0.0
    simpo_gamma: float = 0.5
    orpo_lambda: float = 0.1
    nll_coeff: float = 0.0
    has_ref_logprobs: bool = False  # the samples hold them already: no reference model is needed

    unit = 2

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_label_smoothing(self.label_smoothing)
        for name in ("simpo_gamma", "orpo_lambda", "nll_coeff"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if self.label_smoothing and self.loss not in WITH_LABEL_SMOOTHING:
            raise ValueError(f"label_smoothing = {self.label_smoothing}: {self.loss} has none")
        if self.nll_coeff and self.loss == "orpo":
            raise ValueError(f"nll_coeff = {self.nll_coeff}: orpo has this term with the weight 1")

    @property
    def needs_reference(self) -> bool:
        """Return True if the loss compares with a reference model."""
        return self.loss in WITH_REFERENCE

    @property
    def scores(self) -> Mapping[str, Role]:
        """Return the reference model for ref_logprobs, unless the loss or the samples need none."""
        return {"ref_logprobs": "reference"} if self.needs_reference and not self.has_ref_logprobs else {}

    def targets(self, micro_batches: tuple[MicroBatch, ...]) -> Targets:
        """Count pairs whose completions are equal, whose comparison teaches nothing."""
        num_equal = sum(_num_equal_pairs(micro_batch) for micro_batch in micro_batches)
        return micro_batches, {"equal_pairs": torch.tensor(num_equal, dtype=torch.float64)}

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the summed loss of one micro-batch.

        Args:
            logprobs: float32[R, M], nats; carries gradient.
            entropy: float32[R, M], nats.
            micro_batch: loss arrays, ref_logprobs among them if the loss needs a reference.
        Returns: (float32[] summed loss, the sums to report).
        Raises: ValueError if ref_logprobs are needed and missing.
        """
        loss_mask = micro_batch["loss_mask"]
        if self.needs_reference and "ref_logprobs" not in micro_batch:
            raise ValueError(f"{self.loss} needs ref_logprobs: score the batch with a reference")
        reference = micro_batch["ref_logprobs"] if self.needs_reference else torch.zeros_like(logprobs)
        sums, ref_sums, counts = unit_sums(
            loss_mask, micro_batch["sample_index"], logprobs, reference, torch.ones_like(logprobs)
        )
        counts = counts.clamp(min=1)
        nll = -sums[:, 0] / counts[:, 0]
        nll_coeff = 1.0 if self.loss == "orpo" else self.nll_coeff
        loss = (self._terms(sums - ref_sums, counts) + nll_coeff * nll).sum()
        rewards = self._rewards((sums - ref_sums).detach(), counts)
        reported = (sums if self.needs_reference else sums / counts).detach()
        return loss.to(logprobs.dtype), {
            "num_pairs": torch.tensor(len(sums), dtype=torch.float64, device=sums.device),
            "loss_sum": loss.detach(),
            "nll_sum": nll.detach().sum(),
            "chosen_reward_sum": rewards[:, 0].sum(),
            "rejected_reward_sum": rewards[:, 1].sum(),
            "correct_pairs": (rewards[:, 0] > rewards[:, 1]).sum().double(),
            "chosen_logprob_sum": reported[:, 0].sum(),
            "rejected_logprob_sum": reported[:, 1].sum(),
            "num_tokens": loss_mask.sum().double(),
            "entropy_sum": torch.where(loss_mask, entropy.detach(), 0.0).double().sum(),
        }

    def _terms(self, log_ratios: Tensor, counts: Tensor) -> Tensor:
        """Return float64[P] terms of float64[P, 2] log-ratios, which are log-probabilities without a reference."""
        chosen, rejected = log_ratios.unbind(dim=1)
        if self.loss == "dpo":
            return dpo_terms(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)
        if self.loss == "robust":
            return robust_dpo_terms(chosen, rejected, beta=self.beta, label_smoothing=self.label_smoothing)
        means = (log_ratios / counts).unbind(dim=1)
        if self.loss == "ipo":
            return ipo_terms(*means, beta=self.beta)
        if self.loss == "simpo":
            smoothing = self.label_smoothing
            return simpo_terms(*means, beta=self.beta, gamma=self.simpo_gamma, label_smoothing=smoothing)
        return self.orpo_lambda * odds_ratio_terms(*means)

    def _rewards(self, log_ratios: Tensor, counts: Tensor) -> Tensor:
        """Return float64[P, 2] implicit rewards: beta * log-ratio.

        Without a reference they are beta (under "orpo" lambda) * the mean log-probability per token.
        """
        if self.needs_reference:
            return self.beta * log_ratios
        return (self.orpo_lambda if self.loss == "orpo" else self.beta) * log_ratios / counts

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return means over the step's pairs, under TRL's names where it has them; see docs/metrics.md."""
        return {
            "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
            **completion_metrics(sums, num_chosen="num_pairs", num_rejected="num_pairs"),
            "rewards/accuracies": mean_of(sums, "correct_pairs", "num_pairs"),
            "nll_loss": mean_of(sums, "nll_sum", "num_pairs"),
            "pairs": int(sums["num_pairs"]),
            "pairs_equal": int(sums["equal_pairs"]),
        }


def of_job(config: DpoJobConfig, load_tokenizer: Callable[[], Any]) -> Preference:
    """Build the objective of training on preferences."""
    settings = config.objective
    default = {"beta": _SIMPO_BETA} if settings.loss == "simpo" else {}
    given = {name: value for name, value in settings.model_dump().items() if value is not None}
    return Preference(**{**default, **given}, has_ref_logprobs=config.precomputes_reference)


def _num_equal_pairs(micro_batch: MicroBatch) -> int:
    """Count pairs whose chosen and rejected completion have the same tokens; a sample's are contiguous in its row."""
    arrays = micro_batch.loss_arrays
    loss_mask = arrays["loss_mask"]
    index, token_ids = arrays["sample_index"][loss_mask], arrays["token_ids"][loss_mask]
    starts = np.flatnonzero(np.diff(index, prepend=-1))
    parts = dict(zip(index[starts].tolist(), np.split(token_ids, starts[1:]), strict=False))
    return sum(
        np.array_equal(ids, parts[number + 1])
        for number, ids in parts.items()
        if number % 2 == 0 and number + 1 in parts
    )
