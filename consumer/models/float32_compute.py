"""Compute a bfloat16 model in float32, without a second copy of its weights.

Inside `Float32Compute` every operation gets its bfloat16 inputs in float32, so that what it returns is not rounded: a
weight is copied for its own operation alone. The result is the reference that bfloat16's rounding is measured against.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_ATEN = torch.ops.aten
_COMMUNICATION = ("c10d", "_c10d_functional", "fsdp")  # namespaces of operations that fill buffers of a given dtype


class Float32Compute(TorchDispatchMode):
    """Run a forward without gradient whose sums, products and activations are float32.

    Values that the model itself rounds, by a cast, stay rounded: FSDP2 casts its masters to the weights that engines
    get, and some models cast a constant. What writes into given memory, such as a collective, keeps its dtype.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation of the forward."""
        kwargs = kwargs or {}
        if func is _ATEN.embedding.default:  # rows of a large weight, which are exact in either dtype
            return func(*args, **kwargs).float()
        is_kept = func.namespace in _COMMUNICATION or func.is_view or func._schema.is_mutable
        if is_kept or func is _ATEN._to_copy.default:
            return func(*args, **kwargs)
        return func(*tree_map(_in_float32, args), **tree_map(_in_float32, kwargs))


def _in_float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
