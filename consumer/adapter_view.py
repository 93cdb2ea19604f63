"""Score by a model's base with other adapters than those that are trained, or with none: no second copy of the model.

The reference of a run with adapters is the model at its start: the base alone, or with the adapters of --adapter. The
policy before an update has the same base, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coati_rl.protocols import Role
from consumer.adapters.adapters import read_start
from consumer.backend_config import ModelSource
from consumer.models.policy_model import HeadWeights, PolicyInput
from consumer.role_models import RoleModel


class AdapterView:
    """Stand for a frozen model in a role; methods are collective unless noted."""

    torch_optimizer: Any = None

    def __init__(self, model: RoleModel, directory: Path | None) -> None:
        """Take the trained model, and the directory of the adapters to compute with; None: with none of them."""
        if model.adapters is None:
            raise ValueError(f"the {model.role} model has no adapters")
        self._model, self._adapters = model, model.adapters
        self._own: dict[str, Tensor] | None = None  # this rank's parts, by name
        if directory is not None:
            full, parameters = read_start(directory, model.adapters.infos), model.parameters
            self._own = {
                name: parameters.weight_part(name, full[name]).to(trained, copy=True)
                for name, trained in parameters.trained.items()
            }

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        """Return what `RoleModel.score` does."""
        with self._in_place():
            return self._model.score(inputs)

    def head_weights(self) -> AbstractContextManager[HeadWeights | None]:
        """Provide the LM head's weights, which are not trained; see `RoleModel.head_weights`."""
        return self._model.head_weights()

    def move_to(self, other: RoleModel) -> None:
        """Take the adapters of the model that is trained as they are; not collective."""
        self._own = {name: part.detach().clone() for name, part in other.parameters.trained.items()}

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        if self._own is None:
            with self._adapters.off():
                yield
            return
        trained = self._model.parameters.trained
        kept = {name: part.detach().clone() for name, part in trained.items()}
        try:
            _copy(trained, self._own)
            yield
        finally:
            _copy(trained, kept)


def views(models: Mapping[Role, RoleModel], sources: Mapping[Role, ModelSource]) -> dict[Role, AdapterView]:
    """Return the frozen models by role that share the base of a trained one. `models`: trained ones, by role."""
    return {
        role: AdapterView(models[each.shares], each.adapters.directory if each.adapters else None)
        for role, each in sources.items()
        if each.shares is not None
    }


@torch.no_grad()
def _copy(into: Any, values: dict[str, Tensor]) -> None:
    for name, part in into.items():
        part.copy_(values[name])
