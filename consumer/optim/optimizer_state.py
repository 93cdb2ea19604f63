"""Convert an optimizer's state to and from tensors by parameter name, so that every layout can read a checkpoint.

Kinds are the names of the optimizer's state, such as `step`, `exp_avg` and `exp_avg_sq` of AdamW, and `master` where
the model computes with a bfloat16 copy of the float32 tensor that the optimizer updates. A number that is no tensor has
its type after its name: `step.int`.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coati_rl.errors import ConfigError

MASTER = "master"
_NUMBERS: Mapping[type, tuple[str, torch.dtype]] = {
    bool: (".bool", torch.bool),
    int: (".int", torch.int64),
    float: (".float", torch.float64),
}


def pack_state(optimizer: torch.optim.Optimizer, master: Tensor, *, with_master: bool) -> dict[str, Tensor]:
    """Return one parameter's state by kind; before the first step there is only its master.

    Args:
        optimizer: over the masters.
        master: the tensor that the optimizer updates.
        with_master: the model computes with a rounded copy of it; else the two are the same.
    Returns: tensors by kind, not copied.
    """
    packed = {MASTER: master.detach()} if with_master else {}
    for kind, value in optimizer.state.get(master, {}).items():
        if isinstance(value, Tensor):
            packed[kind] = value
        elif value is not None:  # as a momentum that is not used
            ending, dtype = _NUMBERS[type(value)]
            packed[kind + ending] = torch.tensor(value, dtype=dtype)
    return packed


def unpack_state(
    optimizer: torch.optim.Optimizer,
    masters: Mapping[str, Tensor],
    packed: Callable[[str, str], Tensor | None],
    kinds: Collection[str],
) -> None:
    """Fill optimizer and masters from saved state, the inverse of `pack_state`.

    Args:
        optimizer: over the masters.
        masters: the tensors that the optimizer updates, by parameter name.
        packed: returns the tensor for (parameter name, kind), of the master's shape; None if there is none.
        kinds: of the saved state.
    """
    for name, master in masters.items():
        value = packed(name, MASTER)
        if value is not None:
            with torch.no_grad():
                master.copy_(value)
        # AdamW's fused kernel requires all state on the parameter's device and, without a check, contiguous. The copy
        # also frees the full tensor that a part is a view of.
        state = dict[str, Any]()
        for kind in sorted(kinds):  # in one order on all ranks, which gather the state in its order
            if kind != MASTER and (part := packed(name, kind)) is not None:
                plain, _, ending = kind.rpartition(".")
                is_number = f".{ending}" in [each for each, _ in _NUMBERS.values()]
                copied = part.to(master.device, copy=True, memory_format=torch.contiguous_format)
                state[plain if is_number else kind] = part.item() if is_number else copied
        if state:
            optimizer.state[master] = state


def check_kinds(
    found: Collection[str], expected: Collection[str], directory: Path, *, has_optimizer_files: bool
) -> None:
    """Raise ConfigError if a checkpoint's kinds of state are others than an optimizer keeps; before a step it has none.

    Args:
        found: kinds in the checkpoint, masters among them.
        expected: kinds that the optimizer keeps.
        directory: of the checkpoint, for the message.
        has_optimizer_files: an optimizer was saved, be it before its first step; False: the directory is of a model.
    """
    states = frozenset(found) - {MASTER}
    has_taken_no_step = has_optimizer_files and not states
    if states != frozenset(expected) and not has_taken_no_step:
        raise ConfigError(
            f"{directory} is not a checkpoint to resume from with this --optimizer: it holds {_listed(states)}, and "
            f"the optimizer keeps {_listed(expected)}; use the one that wrote it, or start from its weights with "
            "--model"
        )


def _listed(kinds: Collection[str]) -> str:
    return f"the optimizer state {', '.join(sorted(kinds))}" if kinds else "no optimizer state"
