"""The last thing that happens to a gradient: scaled to the mean loss, measured, clipped, refused if not finite."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from coati_rl.errors import EngineError

GlobalNorm = Callable[[Sequence[Tensor]], float]


def local_norm(gradients: Sequence[Tensor]) -> float:
    """L2 norm over all gradients of this process, which holds them whole."""
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


class GradientClipper:
    """A step hook of the innermost optimizer, where every precision and layout has its gradient in float32.

    Scaling comes before clipping: the sum that arrives here grows with the batch, its mean does not.
    """

    def __init__(self, *, max_norm: float, global_norm: GlobalNorm = local_norm) -> None:
        if not max_norm > 0:
            raise ValueError(f"max_norm = {max_norm} must be positive")
        self._max_norm = max_norm
        self._global_norm = global_norm
        self.loss_scale = 1.0  # set before each step
        self.norm = 0.0  # of the last step's scaled gradient, before clipping

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Multiply all gradients by loss_scale * min(1, max_norm / norm), in place.

        Raises: EngineError if the norm is not finite; no weight has changed then.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad for p in parameters if p.grad is not None]
        self.norm = self._global_norm(gradients) * self.loss_scale
        if not math.isfinite(self.norm):
            raise EngineError(
                f"the gradient norm is {self.norm}: the loss or a log-probability overflowed; no step was taken. "
                "Lower --learning-rate, or look at ratio_max and logprob_gap_max of the steps before"
            )
        torch._foreach_mul_(gradients, self.loss_scale * min(1.0, self._max_norm / (self.norm + 1e-6)))
