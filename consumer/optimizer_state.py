"""AdamW's tensors under their parameters' names, so that a checkpoint means the same in every layout.

Keys are `<kind>/<parameter name>` with kind `step`, `exp_avg`, `exp_avg_sq`, and `master` where the float32 tensor
that is stepped on is not the model's own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from coati_rl.errors import ConfigError

KINDS = ("step", "exp_avg", "exp_avg_sq")


def pack_state(optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name the optimizer's tensors; before the first step there are only masters.

    Args:
        optimizer: AdamW over the masters.
        masters: parameter name to the tensor that is stepped on.
    Returns: key to tensor, not copied.
    """
    packed = {f"master/{name}": master.detach() for name, master in masters.items()}
    for name, master in masters.items():
        for kind, value in optimizer.state.get(master, {}).items():
            packed[f"{kind}/{name}"] = value
    return packed


def unpack_state(optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor], packed: Mapping[str, Tensor]) -> None:
    """The inverse of `pack_state`: fill optimizer and masters.

    Raises: ConfigError if the packed tensors belong to another model.
    """
    names = {key.split("/", 1)[1] for key in packed}
    if names != set(masters):
        odd = sorted(names ^ set(masters))
        raise ConfigError(f"the checkpoint's optimizer belongs to another model: {odd[0]} is not in both")
    for name, master in masters.items():
        with torch.no_grad():
            master.copy_(packed[f"master/{name}"])
        # AdamW counts its steps in a tensor per parameter, which its fused kernel wants beside the parameter.
        state = {kind: packed[f"{kind}/{name}"].to(master.device) for kind in KINDS if f"{kind}/{name}" in packed}
        if state:
            optimizer.state[master] = state
