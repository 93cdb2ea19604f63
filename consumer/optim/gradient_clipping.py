"""The last thing that happens to a gradient: scaled to the mean loss, measured, clipped, refused if not finite."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from coati_rl.errors import EngineError

CPU_PIECE, GPU_PIECE = 2**16, 2**22  # elements; GPUs add up in trees, where more does no harm


def sum_of_squares(gradients: Sequence[Tensor]) -> float:
    """Of all elements. float32 within a piece, float64 over pieces.

    torch's norm adds up in float32 on a CPU: 0.07 % too low at 2**24 elements, 1.4 % at the size of a large embedding,
    so that cutting a tensor over ranks would change the norm.
    """
    pieces = [piece for g in gradients for piece in g.reshape(-1).split(GPU_PIECE if g.is_cuda else CPU_PIECE)]
    if not pieces:
        return 0.0
    return float(torch.stack(torch._foreach_norm(pieces)).double().square().sum())


def scale_and_clip(gradients: Sequence[Tensor], squares: float, *, loss_scale: float, max_norm: float) -> float:
    """Multiply all gradients by loss_scale * min(1, max_norm / norm), in place.

    Scaling comes before clipping: the sum that arrives here grows with the batch, its mean does not.

    Args:
        gradients: this rank's.
        squares: sum of squares over the whole model, the same on every rank.
        loss_scale: turns the summed loss into its mean.
        max_norm: bound on the scaled gradient's norm.
    Returns: the scaled gradient's norm before clipping.
    Raises: EngineError if the norm is not finite; nothing has been touched then.
    """
    norm = math.sqrt(squares) * loss_scale if math.isfinite(squares) else squares
    if not math.isfinite(norm):
        raise EngineError(
            f"the gradient norm is {norm}: the loss or a log-probability overflowed; no step was taken. "
            "Lower --learning-rate, or look at ratio_max and logprob_gap_max of the steps before"
        )
    if gradients:
        torch._foreach_mul_(list(gradients), loss_scale * min(1.0, max_norm / (norm + 1e-6)))
    return norm
