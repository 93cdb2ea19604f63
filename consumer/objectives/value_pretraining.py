"""Optimise a critic alone on recorded rollouts: its values against the returns of their tokens.

The model has a scalar head; the samples have the array `returns` (see `coati_rl.batching.value_samples`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from coati_rl.algorithms.value_loss import ValueLoss, value_metrics
from coati_rl.config.jobs.value import ValueJobConfig
from consumer.objectives.objective import SingleLoss


@dataclass(frozen=True, kw_only=True)
class ValuePretraining(SingleLoss):
    """Average the loss of the values over the tokens of the batch; see `ValueLoss` for what it reports.

    Source: arXiv:2504.05118 (VAPO), value pretraining: Monte Carlo returns of a policy that stands still.
    """

    value_loss: ValueLoss  # not clipped: there is no earlier critic
    sample_arrays = ("returns",)
    is_token_separable = True

    def __call__(
        self, values: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (float32[] summed loss, sums) for float32[R, M] values; the explained variance is of these values."""
        return self.value_loss(values, entropy, {**micro_batch, "old_values": values.detach()})

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return loss, explained variance, means over tokens, and their number; see docs/metrics.md."""
        found = value_metrics(sums, loss_scale=loss_scale)
        names = ("explained_variance", "value_mean", "return_mean")
        loss = {"loss": found["value_loss"], **{name: found[name] for name in names}}
        return {**loss, "loss_tokens": int(sums["value_tokens"])}


def of_job(config: ValueJobConfig, load_tokenizer: Callable[[], Any]) -> ValuePretraining:
    """Build the objective of a critic's training on recorded rollouts."""
    return ValuePretraining(value_loss=ValueLoss(huber=config.objective.value_huber))
