"""Compute float32 matrix products on a CPU with oneDNN where that is faster than MKL, which torch uses for them.

MKL runs AVX2 code on AMD's processors, oneDNN AVX-512 code, which takes 0.45 of the time on Zen 5: 245 against 110
GFLOP/s of one thread. Both sum in float32; results differ by rounding alone. Which one is used depends on the processor
and on shapes, never on a measurement, so that a run repeats its bits. In bfloat16 torch itself uses oneDNN.

M, K and N are the sizes of a product [M, K] @ [K, N].
"""

import functools
import re
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_ZEN_5 = 26  # cpu family, the earliest that was measured
_MIN_TERMS = 2**21  # M * K * N; below, a call of oneDNN costs more than it saves
PRODUCT_BLOCK = 2048  # columns or rows of a product that are copied or added to other memory at a time, from the cache


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, [M, N], of [M, K] and [K, N], without gradient."""
    return _onednn_linear(left, right.T, None) if _prefers_onednn(left, right.shape[1]) else left @ right


def linear_into(out: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Write rows @ weight.T + bias, in the dtype of these, into `out`, without gradient.

    Args:
        out: float32[M, N].
        rows: [M, K].
        weight: [N, K].
        bias: [N].
    Returns: `out`.
    """
    if weight.dtype != torch.float32:
        return out.copy_(F.linear(rows, weight, bias))
    if _prefers_onednn(rows, len(weight)):  # it has no output argument
        for start in range(0, len(weight), PRODUCT_BLOCK):
            block = slice(start, start + PRODUCT_BLOCK)
            out[:, block] = _onednn_linear(rows, weight[block], None if bias is None else bias[block])
        return out
    return torch.mm(rows, weight.T, out=out) if bias is None else torch.addmm(bias, rows, weight.T, out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor, *, fills: bool) -> None:
    """Add left @ right to `total`, or write it there.

    Args:
        total: float32[M, N].
        left: [M, K], float32 or bfloat16.
        right: [K, N], likewise.
        fills: the previous content of `total` is ignored.
    """
    if left.dtype == torch.float32 and not _prefers_onednn(left, right.shape[1]):
        torch.addmm(total, left, right, beta=int(not fills), out=total)
        return
    size = len(total) if total.is_cuda else PRODUCT_BLOCK
    for start in range(0, len(total), size):
        block = slice(start, start + size)
        if fills:
            total[block] = product(left[block], right)
        else:
            total[block] += product(left[block], right)


def use_fast_products(model: nn.Module) -> None:
    """Have the model's linear layers compute forward and backward with the faster library; other layers stay."""
    if _onednn_is_faster():
        for module in model.modules():
            if type(module) is nn.Linear:
                module.forward = MethodType(_linear_forward, module)  # type: ignore[method-assign]


def _linear_forward(module: nn.Linear, inputs: Tensor) -> Tensor:
    if not _prefers_onednn(inputs, module.out_features):
        return F.linear(inputs, module.weight, module.bias)
    return _OnednnLinear.apply(inputs, module.weight, module.bias)  # type: ignore[no-any-return, no-untyped-call]


class _OnednnLinear(torch.autograd.Function):
    """Compute inputs @ weight.T + bias, [..., N], of inputs [..., K], weight [N, K] and bias [N]."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return _onednn_linear(inputs, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])  # [M, N]
        return (
            product(rows, weight).view_as(inputs) if needs_inputs else None,
            product(rows.T, inputs.reshape(-1, inputs.shape[-1])) if needs_weight else None,
            rows.sum(dim=0) if needs_bias else None,
        )


def _prefers_onednn(left: Tensor, num_columns: int) -> bool:
    """Return True if a product of [..., K] with so many columns is faster by oneDNN."""
    is_float32_on_cpu = left.dtype == torch.float32 and left.device.type == "cpu"
    return is_float32_on_cpu and left.numel() * num_columns >= _MIN_TERMS and _onednn_is_faster()


def _onednn_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs @ weight.T + bias by oneDNN's inner product, which torch offers to its compiler alone."""
    return torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")  # type: ignore[no-any-return]


@functools.cache
def _onednn_is_faster() -> bool:
    """Return True on a processor where it was measured to be, if this torch has the operation."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return _is_zen_5(Path("/proc/cpuinfo").read_text(encoding="utf-8"))


def _is_zen_5(cpu_info: str) -> bool:
    """Return True if the text of /proc/cpuinfo is that of AMD's Zen 5, or a later family."""
    family = re.search(r"^cpu family\s*: (\d+)$", cpu_info, re.MULTILINE)
    return "AuthenticAMD" in cpu_info and family is not None and int(family[1]) >= _ZEN_5
