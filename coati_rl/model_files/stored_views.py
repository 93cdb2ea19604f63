"""Say which part of which parameter each tensor of a model's checkpoint is.

transformers joins tensors of checkpoints as it loads them: the experts of a layer become one parameter [E, 2I, H] of
all gate and up projections, and one [E, H, I] of the down projections. Each tensor of the checkpoint is then a view of
a parameter: a shape, strides and an offset. Trainers, engines and checkpoints exchange tensors by the names of the
checkpoint, one at a time, and read and write them through these views; nothing is copied or joined for it.

E experts, I intermediate size of one, H hidden size.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from coati_rl.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredView:
    """Locate a tensor of a checkpoint in a parameter, whose elements are contiguous."""

    name: str  # in the checkpoint
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # elements
    offset: int  # elements

    def of(self, full: Tensor) -> Tensor:
        """Return this part of a full parameter, or of its gradient or state, as a view. `full`: contiguous."""
        return full.as_strided(self.shape, self.stride, full.storage_offset() + self.offset)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredParameter:
    """Hold the tensors of the checkpoint that make up one parameter of a module."""

    name: str  # of the parameter
    shape: tuple[int, ...]
    views: tuple[StoredView, ...] = ()  # none: the checkpoint holds it under its own name, as it is

    def entries(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield names and shapes of the checkpoint's tensors."""
        yield from ((each.name, each.shape) for each in self.views) if self.views else ((self.name, self.shape),)

    def split(self, full: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield the checkpoint's tensors by name, views of the full parameter if that is contiguous."""
        if not self.views:
            yield self.name, full
            return
        full = full.contiguous()
        for each in self.views:
            yield each.name, each.of(full)

    def join(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the full parameter of the checkpoint's tensors, of which `read` returns one by name."""
        if not self.views:
            return read(self.name)
        full: Tensor | None = None
        for each in self.views:
            part = read(each.name)
            full = part.new_empty(self.shape) if full is None else full
            each.of(full).copy_(part)
        assert full is not None  # noqa: S101
        return full


def stored_parameters(model: Any) -> dict[str, StoredParameter]:
    """Return what a model's checkpoint holds of each of its parameters, by the parameter's name, tied ones once.

    The names are those of the files that the model was loaded from, or else those that transformers would save.

    Args:
        model: PreTrainedModel with whole parameters, on any device.
    Raises: ConfigError naming a tensor that is not a part of one parameter, such as one that is permuted.
    """
    from transformers.core_model_loading import revert_weight_conversion

    metas = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in model.named_parameters()}
    owners = {each.untyped_storage()._cdata: name for name, each in metas.items()}
    with torch.no_grad(), _ViewsOnly():
        saved: Mapping[str, Tensor] = revert_weight_conversion(model, dict(metas))
    views: dict[str, list[StoredView]] = {name: [] for name in metas}
    for name, each in saved.items():
        owner = owners.get(each.untyped_storage()._cdata)
        if owner is None:
            raise _not_a_part(model, name)
        view = StoredView(
            name=name, shape=tuple(each.shape), stride=tuple(each.stride()), offset=int(each.storage_offset())
        )
        views[owner].append(view)
    found = {}
    for name, each in metas.items():
        if sum(prod(view.shape) for view in views[name]) != each.numel():
            raise _not_a_part(model, name)
        is_itself = [view.name for view in views[name]] == [name] and views[name][0].shape == tuple(each.shape)
        own = () if is_itself else tuple(views[name])
        found[name] = StoredParameter(name=name, shape=tuple(each.shape), views=own)
    return found


class _ViewsOnly(TorchFunctionMode):
    """Have `contiguous` return a strided view itself, whose place in its parameter a copy would not show."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))


def _not_a_part(model: Any, name: str) -> ConfigError:
    return ConfigError(
        f"{type(model).__name__}: transformers computes {name} from other tensors than parts of one parameter; "
        "trainers and engines exchange weights by the names of checkpoints, so that it cannot be trained yet"
    )
