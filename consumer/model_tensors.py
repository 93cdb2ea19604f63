"""List the tensors that a rank holds of a model between two steps, by what they are for."""

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import Tensor, UntypedStorage

from coati_rl.protocols import Role

if TYPE_CHECKING:
    from consumer.role_models import RoleModel


def weights_of(model: "RoleModel") -> Iterator[Tensor]:
    """Yield what the model computes with, and this rank's part of it: parameters and buffers."""
    yield from chain(model.module.parameters(), model.module.buffers(), model.parameters.local.values())


def optimizer_tensors_of(model: "RoleModel") -> Iterator[Tensor]:
    """Yield the optimizer's masters, where they are not the weights themselves, and its states."""
    if model.torch_optimizer is None:
        return
    weights = {storage_of(each)._cdata for each in weights_of(model)}
    masters = chain.from_iterable(group["params"] for group in model.torch_optimizer.param_groups)
    yield from (each for each in masters if storage_of(each)._cdata not in weights)
    for state in model.torch_optimizer.state.values():
        yield from (each for each in state.values() if isinstance(each, Tensor))


def parts_of(models: Mapping[Role, "RoleModel"]) -> dict[str, Callable[[], Iterator[Tensor]]]:
    """Return what yields the tensors of all models, by part."""
    return {
        "weights": lambda: chain.from_iterable(map(weights_of, models.values())),
        "optimizer": lambda: chain.from_iterable(map(optimizer_tensors_of, models.values())),
    }


def storage_of(tensor: Tensor) -> UntypedStorage:
    """Return the storage of a tensor; of a DTensor that of this rank's part."""
    local: Any = getattr(tensor, "_local_tensor", tensor)
    storage: UntypedStorage = local.untyped_storage()
    return storage
