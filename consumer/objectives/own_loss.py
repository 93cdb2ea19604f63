"""Optimise a user's function of log-probabilities, entropies and the arrays of samples."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from coati_rl.algorithms.sums import is_maximum
from consumer.objectives.objective import SingleLoss, mean_of

Loss = Callable[[Tensor, Tensor, dict[str, Tensor]], Any]  # as `LossFn`, or the summed loss alone


class OwnLoss(SingleLoss):
    """Report the means of what the function reports; it sees whole samples."""

    def __init__(self, function: Loss) -> None:
        self._function = function

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, micro_batch: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the function's loss; of one that returns sums, too, these are reported, tensors or numbers."""
        found = self._function(logprobs, entropy, micro_batch)
        loss, reported = found if isinstance(found, tuple) else (found, {})
        sums = {
            name: torch.as_tensor(value).detach().to(loss.device, torch.float64) for name, value in reported.items()
        }
        num_tokens = micro_batch["loss_mask"].sum().double()
        return loss, {**sums, "loss_sum": loss.detach().double(), "num_tokens": num_tokens}

    def metrics(self, sums: Mapping[str, float], *, loss_scale: float) -> dict[str, float | None]:
        """Return the mean loss, and of what the function has reported the maxima (`*_max`), else means over tokens."""
        reported = {name: value for name, value in sums.items() if name not in ("loss_sum", "num_tokens")}
        means = {name: value if is_maximum(name) else mean_of(sums, name) for name, value in reported.items()}
        return {**means, "loss": sums["loss_sum"] * loss_scale}
