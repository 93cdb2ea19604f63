"""Hold the linear layers of a base in 4 bits: NF4 of bitsandbytes, blocks of 64 (QLoRA, arXiv:2305.14314).

A layer keeps its class. Its weight is uint8[out * in / 2, 1], two numbers a byte, and is made whole in the model's
dtype for each product, forward and backward, one layer at a time. The result is what bitsandbytes' own layer computes.
"""

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

KIND, BLOCK = "nf4", 64  # of numbers that share a scale
_STATE = "four_bit_state"  # attribute of a layer: scales, shape and dtype of its weight


@torch.no_grad()
def quantize(linear: Any, dtype: torch.dtype) -> None:
    """Replace a linear layer's weight, of any floating-point dtype; it is made whole in `dtype` from now on."""
    from bitsandbytes.functional import quantize_4bit  # takes a second

    packed, state = quantize_4bit(linear.weight.detach().to(dtype), blocksize=BLOCK, quant_type=KIND)
    linear.weight = nn.Parameter(packed, requires_grad=False)
    setattr(linear, _STATE, state)
    linear.forward = MethodType(_forward, linear)


def whole_weight(linear: Any) -> Tensor:
    """Return the weight that a quantized layer computes with, [out, in]."""
    from bitsandbytes.functional import dequantize_4bit

    weight: Tensor = dequantize_4bit(linear.weight.detach(), getattr(linear, _STATE))
    return weight


def _forward(linear: nn.Linear, inputs: Tensor) -> Tensor:
    return _QuantizedProduct.apply(inputs, linear)


class _QuantizedProduct(torch.autograd.Function):
    """Compute inputs @ weight.T + bias of a layer whose weight and bias are not trained."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, linear: nn.Linear) -> Tensor:
        ctx.linear = linear
        return F.linear(inputs, whole_weight(linear), linear.bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ whole_weight(ctx.linear), None
