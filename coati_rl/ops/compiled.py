"""Compile functions of tensors into one kernel each, where that was asked for.

For the backward a function's inputs are kept, and nothing that the compiler chose: of one function it may make several
kernels, by shape, that keep other intermediate results. With gradient checkpointing, recomputed activations would then
not be those that were kept.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch  # whose compiler is imported when it is used
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of `check`, relative to the largest number


_SAVED = object()  # stands for a tensor that autograd keeps


class Compiled:
    """Call a function compiled (torch.compile), for any number of tokens.

    Each intermediate result is rounded as without compilation; only sums may be of another order. The backward is
    compiled for itself, and computes again what it needs.
    """

    is_enabled = False  # of the process's functions that know no model

    def __init__(
        self, function: Callable[..., Any], token_dims: tuple[int | None, ...], *, num_linear: int = 0
    ) -> None:
        """Compile with the first call.

        Args:
            function: of tensors, numbers and callables.
            token_dims: the dimension of tokens in each of the first arguments; None: the argument has no tokens.
                Outputs have it where the arguments of the same place do. The last dimension, if it is another one, is
                of few sizes, for each of which a kernel is made.
            num_linear: of the first arguments, in which the outputs of the same shapes are linear: they are not kept.
        """
        self.function = function
        self.num_linear = num_linear
        self._token_dims = token_dims

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it as it is where each operation is looked at, as `Float32Compute` does."""
        if torch._C._len_torch_dispatch_stack():
            return self.function(*arguments, **options)
        tensors = [each for each in arguments if isinstance(each, Tensor)]
        if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
            return _OfInputs.apply(self, options, *arguments)  # type: ignore[no-untyped-call]
        return self.outputs(arguments, options)

    def outputs(self, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
        """Call it compiled, without a gradient."""
        return self._forward(*self._marked(arguments), **options)

    def gradients(
        self,
        arguments: Sequence[Any],
        options: dict[str, Any],
        of_outputs: Sequence[Tensor],
        wanted: tuple[bool, ...],
    ) -> Sequence[Tensor]:
        """Return the gradients of the arguments that are wanted, from those of the outputs."""
        gradients: Sequence[Tensor] = self._backward(self._marked(arguments), options, self._marked(of_outputs), wanted)
        return gradients

    def where_enabled(self, *arguments: Any) -> Any:
        """Call it compiled if that is enabled for the process and the first argument is on a GPU, else as it is."""
        return self(*arguments) if Compiled.is_enabled and arguments[0].is_cuda else self.function(*arguments)

    def check(self, *arguments: Any) -> None:
        """Compare what is returned, what is overwritten and the gradients with those of the function as it is.

        Args:
            arguments: of a call; tensors that require gradients get them.
        Raises: RuntimeError if something differs by more than rounding; and what the compiler raises.
        """
        for found, right in zip(_results(self, arguments), _results(self.function, arguments), strict=True):
            tolerance = _TOLERANCE[right.dtype] * float(right.abs().max())
            if not torch.allclose(found.float(), right.float(), rtol=0, atol=tolerance):
                raise RuntimeError(f"{self.function.__name__} has other results when it is compiled")

    @cached_property
    def _forward(self) -> Callable[..., Any]:
        return _compile(self.function)

    @cached_property
    def _backward(self) -> Callable[..., Any]:
        def gradients(
            arguments: Sequence[Any], options: dict[str, Any], of_outputs: Sequence[Tensor], wanted: tuple[bool, ...]
        ) -> Any:
            def of_wanted(*varied: Tensor) -> Any:
                left = list(varied)
                pairs = zip(arguments, wanted, strict=True)
                own = [left.pop(0) if is_wanted else argument for argument, is_wanted in pairs]
                return self.function(*own, **options)

            varied = [argument for argument, is_wanted in zip(arguments, wanted, strict=True) if is_wanted]
            pull_back = torch.func.vjp(of_wanted, *varied)[1]
            return pull_back(of_outputs[0] if len(of_outputs) == 1 else tuple(of_outputs))

        gradients.__name__ = name = f"{self.function.__name__}_backward"
        # Code of its own: the compiler counts and searches what it has made by code, and stops after a few.
        gradients.__code__ = gradients.__code__.replace(co_name=name)
        return _compile(gradients)

    def _marked(self, arguments: Sequence[Any]) -> list[Any]:
        """Return the arguments as plain tensors, for which the compiler makes no kernel of another kind."""
        plain = [argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments]
        for tensor, dim in zip(plain, self._token_dims, strict=False):
            if dim is not None:
                _torch._dynamo.maybe_mark_dynamic(tensor, dim)
                if dim % tensor.ndim != tensor.ndim - 1:
                    _torch._dynamo.mark_static(tensor, tensor.ndim - 1)
        return plain


class _OfInputs(torch.autograd.Function):
    """Call a compiled function, of which the inputs alone are kept for the backward."""

    @staticmethod
    def forward(ctx: Any, compiled: Compiled, options: dict[str, Any], *arguments: Any) -> Any:
        kept = arguments[compiled.num_linear :]
        ctx.save_for_backward(*(each for each in kept if isinstance(each, Tensor)))
        ctx.kept = [_SAVED if isinstance(each, Tensor) else each for each in kept]
        ctx.call = compiled, options
        return compiled.outputs(arguments, options)

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> Any:
        saved, (compiled, options) = iter(ctx.saved_tensors), ctx.call
        # The gradient does not depend on what is linear, for which any tensor of the shape can stand.
        of_linear = of_outputs[: compiled.num_linear]
        arguments = [*of_linear, *(next(saved) if each is _SAVED else each for each in ctx.kept)]
        wanted = tuple(ctx.needs_input_grad[2:])
        gradients = iter(compiled.gradients(arguments, options, of_outputs, wanted))
        return (None, None, *(next(gradients) if each else None for each in wanted))


def _compile(function: Callable[..., Any]) -> Callable[..., Any]:
    # Deterministic: no choice of kernels by their speed here, which may differ between ranks and from run to run.
    return torch.compile(function, options={"emulate_precision_casts": True, "deterministic": True})


def _results(function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return outputs, the arguments afterwards, and gradients of the outputs' sums."""

    def copied(argument: Any) -> Any:
        is_tensor = isinstance(argument, Tensor)
        return argument.detach().clone().requires_grad_(argument.requires_grad) if is_tensor else argument

    own = [copied(argument) for argument in arguments]
    outputs = function(*own)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs or ())
    tensors = [each for each in own if isinstance(each, Tensor)]
    leaves = [each for each in tensors if each.requires_grad]
    gradients = torch.autograd.grad([each.float().sum() for each in outputs], leaves) if leaves else ()
    return [each.detach() for each in (*outputs, *tensors, *gradients)]
