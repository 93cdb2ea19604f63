"""Make a model's optimizer and set its learning rate."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.own_optimizer import load_optimizer
from coati_rl.plugins import is_plugin
from consumer.optim.optimizer_state import pack_state

_SCALE = "lr_scale"  # in a parameter group: its learning rate as a multiple of --learning-rate


def make_optimizer(
    parameters: Mapping[str, Tensor], config: OptimizerConfig, *, without_decay: Collection[str] = ()
) -> torch.optim.Optimizer:
    """Make AdamW, or the user's own optimizer. Its learning rate is set by every step.

    Args:
        parameters: by name.
        config: settings.
        without_decay: names of those that AdamW's weight decay leaves alone, unless the settings exempt none.
    """
    if not is_plugin(config.optimizer):
        exempt = frozenset(without_decay) if config.weight_decay_exempt == "norms_and_biases" else frozenset()
        decayed: dict[str, Any] = {"params": [p for name, p in parameters.items() if name not in exempt]}
        undecayed = [p for name, p in parameters.items() if name in exempt]
        others: dict[str, Any] = {"params": undecayed, "weight_decay": 0.0}
        return torch.optim.AdamW(
            [group for group in (decayed, others) if group["params"]],
            lr=0.0,
            betas=config.adam_betas,
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
    optimizer = load_optimizer(config)([*parameters.values()], lr=config.learning_rate)
    for group in optimizer.param_groups:
        group[_SCALE] = float(group.get("lr", config.learning_rate)) / config.learning_rate
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all parameter groups, in the proportions in which they were made."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(_SCALE, 1.0)


def state_kinds(config: OptimizerConfig) -> frozenset[str]:
    """Return the kinds of state that the optimizer keeps of a matrix or a vector after a step."""
    parameters = {name: torch.ones(shape, requires_grad=True) for name, shape in (("matrix", (2, 2)), ("vector", (2,)))}
    optimizer = make_optimizer(parameters, config)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return frozenset(kind for each in parameters.values() for kind in pack_state(optimizer, each, with_master=False))
