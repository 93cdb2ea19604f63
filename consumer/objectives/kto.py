"""Optimise single completions that are labelled desirable or undesirable: KTO.

A unit is an example and the same prompt with another row's completion, which only the KL estimate reads. R rows, M loss
tokens per row, E examples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.algorithms.kto import check_weights, kl_estimate, kto_terms
from coati_rl.algorithms.preference import check_beta
from coati_rl.algorithms.sequences import unit_sums
from coati_rl.algorithms.token_selection import Reduce
from coati_rl.batch import MicroBatch
from coati_rl.config.jobs.kto import KtoJobConfig
from coati_rl.protocols import Role
from consumer.objectives.completion_metrics import completion_metrics
from consumer.objectives.objective import SingleLoss

DESIRABLE, UNDESIRABLE, MISMATCHED = 1.0, 0.0, -1.0  # values of the loss array `label`


@dataclass(frozen=True, kw_only=True)
class Kto(SingleLoss):
    """Average KTO's loss over the examples of the global batch, whose KL estimate is the step's.

    loss = sum over examples of weight * (1 - sigmoid(beta * (log-ratio - kl))), mirrored if undesirable. `loss_weights`
    of tokens are not read.

    Reports, detached float64[] each, summed over examples unless said: loss_sum (as returned); num_chosen and
    num_rejected, the desirable and the undesirable examples; of each of both chosen_reward_sum and rejected_reward_sum
    (beta * log-ratio), chosen_logprob_sum and rejected_logprob_sum (nats); num_tokens, entropy_sum (nats, over tokens
    of examples); kl_sum_of_examples, the KL estimate of the step in nats, once for each.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    has_ref_logprobs: bool = False  # the samples hold them already: no reference model is needed

    sample_arrays = ("label",)
    unit = 2

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_weights(self.desirable_weight, self.undesirable_weight)

    @property
    def scores(self) -> Mapping[str, Role]:
        """Return the models for the KL estimate, and the reference for ref_logprobs unless the samples hold them."""
        reference: dict[str, Role] = {} if self.has_ref_logprobs else {"ref_logprobs": "reference"}
        return {"policy_logprobs": "policy", **reference}

    @property
    def needs_whole_step(self) -> bool:
        """Return True: the KL estimate is of the step."""
        return True

    def with_whole_step(self, micro_batches: Sequence[MicroBatch], reduce: Reduce) -> Sequence[MicroBatch]:
        """Fill in the KL estimate, and leave mismatched completions out of the loss."""
        sums = reduce(self.step_sums(micro_batches))
        if not sums:
            return micro_batches  # no loss is computed here
        kl = kl_estimate(sums["kl_sum"], sums["kl_samples"])
        return [_with_estimate(micro_batch, kl) for micro_batch in micro_batches]

    def step_sums(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Tensor]:
        """Sum the log-ratios of mismatched completions, and count those; empty on ranks without the LM head."""
        if any("policy_logprobs" not in micro_batch.loss_arrays for micro_batch in micro_batches):
            return {}  # not scored here, and reduced over the ranks with the LM head alone
        total, count = 0.0, 0
        for arrays in (micro_batch.loss_arrays for micro_batch in micro_batches):
            mask = arrays["loss_mask"] & (arrays["label"] == MISMATCHED)
            log_ratios = arrays["policy_logprobs"][mask].astype(np.float64) - arrays["ref_logprobs"][mask]
            total += float(log_ratios.sum())
            count += len(np.unique(arrays["sample_index"][mask]))
        return {
            "kl_sum": torch.tensor(total, dtype=torch.float64),
            "kl_samples": torch.tensor(count, dtype=torch.float64),
        }

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the summed loss of one micro-batch.

        Args:
            logprobs: float32[R, M], nats; carries gradient.
            entropy: float32[R, M], nats.
            micro_batch: loss arrays, among them ref_logprobs; label, as above; kl_estimate, nats, the same everywhere.
        Returns: (float32[] summed loss, the sums to report).
        """
        loss_mask = micro_batch["loss_mask"] & (micro_batch["label"] != MISMATCHED)
        values = (logprobs, micro_batch["ref_logprobs"], micro_batch["label"], torch.ones_like(logprobs))
        totals = unit_sums(loss_mask, micro_batch["sample_index"], *values)
        sums, ref_sums, labels, counts = (total[:, 0] for total in totals)  # of the examples
        is_desirable = labels / counts == DESIRABLE
        kl = micro_batch["kl_estimate"].amax().double()
        log_ratios = sums - ref_sums
        terms = kto_terms(
            log_ratios,
            is_desirable,
            kl,
            beta=self.beta,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        loss = terms.sum()
        reported = {
            "num_tokens": loss_mask.sum().double(),
            "loss_sum": loss.detach(),
            "kl_sum_of_examples": kl * len(terms),
        }
        reported["entropy_sum"] = torch.where(loss_mask, entropy.detach(), 0.0).double().sum()
        for name, chosen in (("chosen", is_desirable), ("rejected", ~is_desirable)):
            reported[f"num_{name}"] = chosen.sum().double()
            reported[f"{name}_reward_sum"] = self.beta * log_ratios.detach()[chosen].sum()
            reported[f"{name}_logprob_sum"] = sums.detach()[chosen].sum()
        return loss.to(logprobs.dtype), reported

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return means over the step's desirable ("chosen") and undesirable examples; see docs/metrics.md."""
        num_examples = sums["num_chosen"] + sums["num_rejected"]
        return {
            "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
            "kl": sums["kl_sum_of_examples"] / num_examples if num_examples else None,
            **completion_metrics(sums, num_chosen="num_chosen", num_rejected="num_rejected"),
            "examples_desirable": int(sums["num_chosen"]),
            "examples_undesirable": int(sums["num_rejected"]),
        }


def _with_estimate(micro_batch: MicroBatch, kl: float) -> MicroBatch:
    arrays = micro_batch.loss_arrays
    return micro_batch.with_arrays(
        kl_estimate=np.full(arrays["loss_mask"].shape, kl, dtype=np.float32),
        loss_mask=arrays["loss_mask"] & (arrays["label"] != MISMATCHED),
    )


def of_job(config: KtoJobConfig, load_tokenizer: Callable[[], Any]) -> Kto:
    """Build the objective of training on labelled completions."""
    return Kto(**config.objective.model_dump(), has_ref_logprobs=config.precomputes_reference)
