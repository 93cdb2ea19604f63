"""Convert AdamW's state to and from tensors by parameter name, so that every layout can read a checkpoint.

Kinds are `step`, `exp_avg`, `exp_avg_sq`, and `master` where the model computes with a bfloat16 copy of the float32
tensor that the optimizer updates.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

KINDS = ("step", "exp_avg", "exp_avg_sq")


def pack_state(optimizer: torch.optim.Optimizer, master: Tensor, *, with_master: bool) -> dict[str, Tensor]:
    """Return one parameter's state by kind; before the first step there is only its master.

    Args:
        optimizer: AdamW over the masters.
        master: the tensor that the optimizer updates.
        with_master: the model computes with a rounded copy of it; else the two are the same.
    Returns: tensors by kind, not copied.
    """
    packed = {"master": master.detach()} if with_master else {}
    return packed | {kind: value for kind, value in optimizer.state.get(master, {}).items() if kind in KINDS}


def unpack_state(
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, Tensor],
    packed: Callable[[str, str], Tensor | None],
) -> None:
    """Fill optimizer and masters from saved state, the inverse of `pack_state`.

    Args:
        optimizer: AdamW over the masters.
        masters: the tensors that the optimizer updates, by parameter name.
        packed: returns the tensor for (parameter name, kind), of the master's shape; None if there is none.
    """
    for name, master in masters.items():
        value = packed(name, "master")
        if value is not None:
            with torch.no_grad():
                master.copy_(value)
        # AdamW's fused kernel requires all state on the parameter's device and, without a check, contiguous. The copy
        # also frees the full tensor that a part is a view of.
        state = {
            kind: part.to(master.device, copy=True, memory_format=torch.contiguous_format)
            for kind in KINDS
            if (part := packed(name, kind)) is not None
        }
        if state:
            optimizer.state[master] = state
