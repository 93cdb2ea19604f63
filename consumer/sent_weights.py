"""Say what engines get of a policy: all its weights, with adapters merged into them, or the adapters alone."""

import functools
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from coati_rl.model_files.adapter_files import PREFIX
from coati_rl.model_files.identity import model_identity
from coati_rl.transport.manifest import TensorEntry, dtype_name
from consumer.parallel.layout import Layout
from consumer.role_models import RoleModel


class SentWeights:
    """Name and export the tensors of a weight sync."""

    def __init__(self, policy: RoleModel, layout: Layout, dtype: torch.dtype, *, base: Path | None) -> None:
        """Store the arguments.

        Args:
            policy: the model.
            layout: of this rank.
            dtype: of the tensors as they are sent.
            base: directory of the base whose adapters alone are sent; None: all weights are sent.
        """
        self._policy, self._layout, self._dtype, self._base = policy, layout, dtype, base
        self._infos = policy.infos
        if base is not None:
            if policy.adapters is None:
                raise ValueError("a policy without adapters cannot send them")
            self._infos = policy.adapters.factor_infos

    def entries(self) -> tuple[TensorEntry, ...]:
        """Return the entries of all tensors that all senders export, in order; adapters have PEFT's names."""
        prefix, dtype = "" if self._base is None else PREFIX, dtype_name(self._dtype)
        return tuple(
            TensorEntry(name=prefix + name, dtype=dtype, shape=shape, sender=info.stage)
            for info in self._infos
            for name, shape in info.saved.entries()
        )

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensors that this rank sends, by name; see `RoleModel.export`."""
        if self._base is None:
            yield from self._policy.export(self._dtype)
        elif self._layout.is_first_copy:
            for info in self._infos:
                if info.stage == self._layout.stage:
                    yield PREFIX + info.name, self._policy.parameters.full_weight(info.name).to(self._dtype)

    @functools.cached_property
    def base_identity(self) -> str:
        """Return the identity of the base beside which adapters are sent, which is read once; else an empty text."""
        return "" if self._base is None else model_identity(self._base)
