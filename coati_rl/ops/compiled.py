"""Compile functions of tensors into one kernel each, where that was asked for."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_torch: Any = torch  # whose compiler is imported when it is used
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of `check`, relative to the largest number


class Compiled:
    """Call a function compiled (torch.compile), for any number of tokens.

    Each intermediate result is rounded as without compilation; only sums may be of another order.
    """

    is_enabled = False  # of the process's functions that know no model

    def __init__(self, function: Callable[..., Any], token_dims: tuple[int | None, ...]) -> None:
        """Compile with the first call.

        Args:
            function: of tensors, numbers and callables.
            token_dims: the dimension of tokens in each of the first arguments; None: the argument has no tokens.
        """
        self.function = function
        self._token_dims = token_dims

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Call it as it is where each operation is looked at, as `Float32Compute` does."""
        if torch._C._len_torch_dispatch_stack():
            return self.function(*arguments, **options)
        for argument, dim in zip(arguments, self._token_dims, strict=False):
            if dim is not None:
                _torch._dynamo.maybe_mark_dynamic(argument, dim)
        return self._compiled(*arguments, **options)

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
    def _compiled(self) -> Callable[..., Any]:
        # Deterministic: no choice of kernels by their speed here, which may differ between ranks and from run to run.
        return torch.compile(self.function, options={"emulate_precision_casts": True, "deterministic": True})


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
