"""AdamW's tensors under their parameters' names, so that a checkpoint means the same in every layout.

Kinds are `step`, `exp_avg`, `exp_avg_sq`, and `master` where the model computes with a rounded copy of the float32
tensor that is stepped on.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

KINDS = ("step", "exp_avg", "exp_avg_sq")


def pack_state(optimizer: torch.optim.Optimizer, master: Tensor, *, with_master: bool) -> dict[str, Tensor]:
    """Return what is known of one parameter, by kind; before the first step there is only its master.

    Args:
        optimizer: AdamW over the masters.
        master: the tensor that is stepped on.
        with_master: the model computes with a rounded copy of it; else the two are the same.
    Returns: kind to tensor, not copied.
    """
    packed = {"master": master.detach()} if with_master else {}
    return packed | {kind: value for kind, value in optimizer.state.get(master, {}).items() if kind in KINDS}


def unpack_state(
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, Tensor],
    packed: Callable[[str, str], Tensor | None],
) -> None:
    """The inverse: fill optimizer and masters.

    Args:
        optimizer: AdamW over the masters.
        masters: parameter name to the tensor that is stepped on.
        packed: (parameter name, kind) to its tensor, of the master's shape; None if there is none.
    """
    for name, master in masters.items():
        value = packed(name, "master")
        if value is not None:
            with torch.no_grad():
                master.copy_(value)
        # AdamW's fused kernel wants all of it beside the parameter and, without asking, contiguous. The copy also lets
        # go of the whole tensor that a part is a view of.
        state = {
            kind: part.to(master.device, copy=True, memory_format=torch.contiguous_format)
            for kind in KINDS
            if (part := packed(name, kind)) is not None
        }
        if state:
            optimizer.state[master] = state
