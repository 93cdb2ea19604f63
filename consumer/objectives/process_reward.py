"""Optimise a process reward model: a language model predicts after each step of a solution whether it is right.

Each loss token of a sample is a step: its source is the step's placeholder token (see
`coati_rl.reading.reward_samples`). There are two label tokens, a positive and a negative one. N steps.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coati_rl.algorithms.reward_model import label_loss
from coati_rl.batch import MicroBatch
from coati_rl.config.jobs.prm import PrmJobConfig
from coati_rl.reading.reward_samples import label_token_ids
from consumer.objectives.objective import SingleLoss, Targets, mean_of


@dataclass(frozen=True, kw_only=True)
class ProcessReward(SingleLoss):
    """Average the cross-entropy of the label tokens over the steps of the batch.

    Reports, detached float64[] each and summed over steps: num_steps; loss_sum; correct_sum (the likelier label token
    is that of the target).
    """

    label_token_ids: tuple[int, int]  # the positive and the negative label
    is_restricted: bool = True  # probabilities are normalised over the label tokens, not over the vocabulary

    sample_arrays = ("step_label",)

    def targets(self, micro_batches: tuple[MicroBatch, ...]) -> Targets:
        """Ask for the log-probabilities of both label tokens at each step, and add their target probabilities."""
        return tuple(self._expand(micro_batch) for micro_batch in micro_batches), {}

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (float32[] summed loss, sums) for the float32[R, 2 * M] log-probabilities that `targets` asks for."""
        loss_mask = micro_batch["loss_mask"]
        by_label = logprobs[loss_mask].view(-1, 2)  # [N, 2]
        # A blank micro-batch has no targets, and no steps either.
        target = micro_batch.get("target", torch.zeros_like(logprobs))[loss_mask].view(-1, 2)
        loss = label_loss(by_label, target, is_restricted=self.is_restricted).sum()
        is_correct = by_label.detach().argmax(dim=-1) == target.argmax(dim=-1)
        return loss, {
            "num_steps": loss_mask.sum().double() / 2,
            "loss_sum": loss.detach().double(),
            "correct_sum": is_correct.double().sum(),
        }

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return loss, share of steps with the right label, and their number; see docs/metrics.md."""
        return {
            "loss": sums["loss_sum"] * loss_scale if loss_scale else None,
            "step_accuracy": mean_of(sums, "correct_sum", "num_steps"),
            "labelled_steps": int(sums["num_steps"]),
        }

    def _expand(self, micro_batch: MicroBatch) -> MicroBatch:
        """Put two loss tokens in the place of each, one for each label token: [R, M] becomes [R, 2 * M]."""
        arrays = {name: np.repeat(array, 2, axis=1) for name, array in micro_batch.loss_arrays.items()}
        is_positive = np.arange(arrays["token_ids"].shape[1]) % 2 == 0
        positive, negative = self.label_token_ids
        arrays["token_ids"] = np.where(arrays["loss_mask"], np.where(is_positive, positive, negative), 0)
        if "step_label" in arrays:  # not in a blank one
            label = arrays.pop("step_label")
            arrays["target"] = np.where(is_positive, label, 1 - label)
        return micro_batch.replace_arrays(arrays)


def of_job(config: PrmJobConfig, load_tokenizer: Callable[[], Any]) -> ProcessReward:
    """Build the objective of a process reward model's training. Raises: ConfigError for a label that is no token."""
    return ProcessReward(
        label_token_ids=label_token_ids(load_tokenizer(), config.objective.reward_tokens),
        is_restricted=config.objective.label_softmax == "reward-tokens",
    )
