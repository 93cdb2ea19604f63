"""Compile what a decoder layer does between its matrix products: norms, rotary embeddings and activations.

Eager PyTorch reads and writes all activations once an operation; a compiled function does so once, and its backward
again once. A module is taken by what it computes, which is tried on random numbers: others of that name stay.
"""

import logging
from collections.abc import Callable
from functools import cache
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from coati_rl.ops.compiled import Compiled
from coati_rl.ops.vocab_chunks import check_compiled

logger = logging.getLogger(__name__)

_ROTARY = "apply_rotary_pos_emb"  # of transformers' modules
_TOKENS, _EPSILON = 32, 1e-6  # of a trial


class CompiledOps:
    """Compile the operations of one model. A norm or activation stands for all of its kind."""

    def __init__(self, model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> None:
        """Find what can be compiled; `dtype` is that of activations."""
        modules: list[Any] = list(model.modules())
        self._norms = [module for module in modules if _is_rms_norm(module)]
        self._activations = [module for module in modules if _is_gated(module)]
        self._attentions = [module for module in modules if _ROTARY in _names(module)]
        self._device, self._dtype = device, dtype

    def are_right(self) -> bool:
        """Compile each function and compare it with itself as it is, forward and backward; False if that fails."""
        try:
            self._check()
        except (RuntimeError, OSError, ImportError) as error:  # a compiler that is missing, or too old for this GPU
            reason = str(error).strip().splitlines()
            logger.warning("operations are not compiled, which costs time alone: %s", reason[0] if reason else error)
            return False
        return True

    def use(self) -> None:
        """Compute by them from now on, and on GPUs so the loss over the vocabulary, of all models of the process."""
        Compiled.is_enabled = True
        for module in self._norms:
            module.forward = _norm_forward(module)
        for module in self._activations:
            module.forward = _gated_forward(module)
        for module in self._attentions:
            module.forward = _rotated_forward(module)

    def _check(self) -> None:
        def numbers(*shape: int) -> Tensor:
            generator = torch.Generator().manual_seed(0)
            return torch.randn(shape, generator=generator).to(self._device, self._dtype).requires_grad_()

        widths: dict[int, None] = dict.fromkeys(int(norm.weight.shape[-1]) for norm in self._norms)
        for width in widths:
            _compiled_norm().check(numbers(_TOKENS, width), numbers(width), _EPSILON)
        kinds = dict.fromkeys((type(module.act_fn), _width(module.gate_proj)) for module in self._activations)
        for kind, width in kinds:
            gated = _compiled_gate(kind)  # type: ignore[arg-type]  # a class is hashable
            gated.check(numbers(_TOKENS, width), numbers(_TOKENS, width))
        functions = dict.fromkeys((_names(module)[_ROTARY], _head_width(module)) for module in self._attentions)
        for function, width in functions:
            angles = numbers(1, _TOKENS, width).detach()
            queries, keys = numbers(1, 4, _TOKENS, width), numbers(1, 2, _TOKENS, width)
            _compiled_rotary(function).check(queries, keys, angles.cos(), angles.sin())
        if self._device.type == "cuda":
            check_compiled(self._device)


def rms_norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Return the norm of Llama and others: [N, H] in the dtype of `hidden`, of float32 sums."""
    values = hidden.to(torch.float32)
    values = values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + epsilon)
    return weight * values.to(hidden.dtype)


@cache
def _compiled_norm() -> Compiled:
    return Compiled(rms_norm, (0,))


@cache
def _compiled_gate(kind: Callable[[], nn.Module]) -> Compiled:
    activation = kind()

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        product: Tensor = activation(gate) * up
        return product

    return Compiled(gated, (0, 0))


@cache
def _compiled_rotary(function: Callable[..., Any]) -> Compiled:
    # Queries and keys are [R, heads, L, D], cosines and sines [R, L, D]; in the first two it is linear.
    return Compiled(function, (2, 2, 1, 1), num_linear=2)


def _norm_forward(module: Any) -> Callable[[Tensor], Tensor]:
    def forward(hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])
        normed: Tensor = _compiled_norm()(flat, module.weight, module.variance_epsilon)
        return normed.view(hidden.shape)

    return forward


def _gated_forward(module: Any) -> Callable[[Tensor], Tensor]:
    gated = _compiled_gate(type(module.act_fn))  # type: ignore[arg-type]  # a class is hashable

    def forward(hidden: Tensor) -> Tensor:
        gate, up = module.gate_proj(hidden), module.up_proj(hidden)
        product: Tensor = gated(gate.flatten(0, -2), up.flatten(0, -2))
        down: Tensor = module.down_proj(product.view(gate.shape))
        return down

    return forward


def _rotated_forward(module: Any) -> Any:
    """Return the module's forward with the compiled function under that name, for this module alone."""
    function, names = module.forward.__func__, _names(module)
    own = FunctionType(
        function.__code__,
        {**names, _ROTARY: _compiled_rotary(names[_ROTARY])},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    own.__kwdefaults__ = function.__kwdefaults__
    return MethodType(own, module)


def _width(projection: nn.Module) -> int:
    """Return the width of what a projection makes, or any where it does not say."""
    return int(getattr(projection, "out_features", 64))


def _head_width(module: nn.Module) -> int:
    return int(getattr(module, "head_dim", 64))


def _names(module: nn.Module) -> dict[str, Any]:
    """Return the global names that an attention's forward sees; none of another module."""
    function: Any = getattr(module.forward, "__func__", None)
    if function is None or not type(module).__name__.endswith("Attention"):
        return {}
    return function.__globals__ if _ROTARY in function.__code__.co_names else {}


def _is_rms_norm(module: nn.Module) -> bool:
    """Return True if the module's forward is `rms_norm` of its weight, bit for bit."""
    epsilon = getattr(module, "variance_epsilon", None)
    is_here = isinstance(getattr(module, "weight", None), Tensor)  # and not on another pipeline stage
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float) or not is_here:
        return False
    hidden, weight = _random(_TOKENS, 64), 1 + _random(64)
    return _computes(module, SimpleNamespace(weight=weight, variance_epsilon=epsilon), hidden) == _bits(
        rms_norm(hidden, weight, epsilon)
    )


def _is_gated(module: nn.Module) -> bool:
    """Return True if the module's forward is the down projection of the activated gate times the up projection."""
    activation = getattr(module, "act_fn", None)
    if not isinstance(activation, nn.Module) or any(True for _ in activation.parameters()):
        return False
    try:
        same = type(activation)()  # without settings of its own
    except TypeError:
        return False
    hidden = _random(_TOKENS, 64)
    parts = SimpleNamespace(
        gate_proj=lambda x: 2 * x, up_proj=lambda x: x + 1, down_proj=lambda x: 3 * x, act_fn=activation
    )
    return _computes(module, parts, hidden) == _bits(3 * (same(2 * hidden) * (hidden + 1)))


def _computes(module: nn.Module, parts: SimpleNamespace, hidden: Tensor) -> bytes | None:
    """Return what the module's forward makes of `hidden` if these are its parts; None if it needs others."""
    try:
        with torch.no_grad():
            return _bits(type(module).forward(parts, hidden))
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):  # of what else it wants
        return None


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def _bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
