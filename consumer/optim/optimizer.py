"""Make a model's optimizer and set the numbers of a step."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from coati_rl.config.optimizer import OptimizerConfig
from coati_rl.own_optimizer import load_optimizer
from coati_rl.plugins import is_plugin
from consumer.optim.optimizer_state import pack_state

_SCALE = "lr_scale"  # in a parameter group: its learning rate as a multiple of --learning-rate
_IS_EXEMPT = "is_exempt"  # in one of AdamW's: weight decay leaves it alone


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
        decayed = [p for name, p in parameters.items() if name not in exempt]
        undecayed = [p for name, p in parameters.items() if name in exempt]
        groups: list[dict[str, Any]] = [
            {"params": decayed, _IS_EXEMPT: False},
            {"params": undecayed, _IS_EXEMPT: True, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(
            [group for group in groups if group["params"]],
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


def set_step(optimizer: torch.optim.Optimizer, config: OptimizerConfig, learning_rate: float) -> None:
    """Set AdamW's numbers for a step; of a user's optimizer the learning rate alone, in the proportions it began with.

    Args:
        optimizer: of `make_optimizer`.
        config: settings, of the same optimizer and exemptions.
        learning_rate: of the step.
    """
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(_SCALE, 1.0)
        if _IS_EXEMPT in group:
            weight_decay = 0.0 if group[_IS_EXEMPT] else config.weight_decay
            group.update(betas=config.adam_betas, eps=config.adam_eps, weight_decay=weight_decay)


def state_kinds(config: OptimizerConfig) -> frozenset[str]:
    """Return the kinds of state that the optimizer keeps of a matrix or a vector after a step."""
    parameters = {name: torch.ones(shape, requires_grad=True) for name, shape in (("matrix", (2, 2)), ("vector", (2,)))}
    optimizer = make_optimizer(parameters, config)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return frozenset(kind for each in parameters.values() for kind in pack_state(optimizer, each, with_master=False))
