"""Measure the sizes of the tensors that code creates, and count its matrix products."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)


class TensorSizes(TorchDispatchMode):
    """A context that notes every torch operation and the shape of its results, in forward and backward."""

    num_products = 0

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.operations: set[Any] = set()  # torch.ops.aten.*

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        self.shapes |= {tuple(result.shape) for result in tree_leaves(results) if isinstance(result, Tensor)}
        self.operations.add(func.overloadpacket)
        self.num_products += func.overloadpacket in PRODUCTS
        return results

    def largest(self, *, but: Sequence[tuple[int, ...]]) -> int:
        """Elements of the largest tensor that has none of the shapes `but`."""
        return max(math.prod(shape) for shape in self.shapes - set(but))
