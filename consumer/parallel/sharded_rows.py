"""Hold this rank's rows of a model's parameters, as FSDP2 shards them, and convert between rows and full tensors.

A full tensor is first cut over tensor-parallel ranks; of the shard, the ranks of `layout.fsdp_group` hold equally many
rows (dimension 0) each, the last ones fewer or none.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.ops.gradient_sketch import ShardPlace, place_of
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import ParameterInfo, full_of_shards, shard_of
from consumer.parallel.process_group import collective


class ShardedRows:
    """Implement `ModelParameters`; the parts are a trained model's float32 masters, or a frozen model's own weights."""

    def __init__(
        self, model: PreTrainedModel, infos: Sequence[ParameterInfo], layout: Layout, weight_dtype: torch.dtype
    ) -> None:
        """Take `model` after sharding and before its first forward; it computes in `weight_dtype`."""
        self.dtensors = dict(model.named_parameters())  # a gathered module would list unsharded parameters
        self.infos = {info.name: info for info in infos}
        with torch.no_grad():
            self.local = {name: local_rows(parameter) for name, parameter in self.dtensors.items()}
        self.trained = {name: part for name, part in self.local.items() if self.dtensors[name].requires_grad}
        self._layout = layout
        self._weight_dtype = weight_dtype

    def counts_in_norm(self, name: str) -> bool:
        """Return True on exactly one of the ranks that hold the same elements."""
        layout = self._layout
        is_first_shard = self.infos[name].split_dim is not None or layout.tp_rank == 0
        return is_first_shard and layout.is_first_copy

    def place(self, name: str) -> ShardPlace:
        """Return where this rank's rows are in the full tensor."""
        layout, shape, dim = self._layout, self._shard_shape(name), self.infos[name].split_dim
        return place_of(
            shape,
            start=layout.fsdp_rank * self._rows_per_rank(name) * prod(shape[1:]),
            split_dim=dim if layout.tp_group is not None else None,
            offset=0 if dim is None else layout.tp_rank * shape[dim],
        )

    def full_weight(self, name: str) -> Tensor:
        """Return the full weight, rounded before it is gathered; collective."""
        return full_of_shards(self.infos[name], self.shard_weight(name), self._layout)

    def shard_weight(self, name: str) -> Tensor:
        """Return this tensor-parallel rank's shard of a weight, rounded like `full_weight`; collective."""
        return self._joined_rows(name, self.local[name].to(self._weight_dtype))

    def weight_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's rows."""
        return self.state_part(name, full)

    def full_state(self, name: str, part: Tensor) -> Tensor:
        """Gather the full tensor from each rank's rows; collective."""
        return full_of_shards(self.infos[name], self._joined_rows(name, part), self._layout)

    def state_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's rows, the inverse of `full_state`."""
        return rows_of_rank(shard_of(self.infos[name], full, self._layout), self._layout)

    def _joined_rows(self, name: str, part: Tensor) -> Tensor:
        if self._layout.fsdp_group is None:
            return part
        shape, num_rows = self._shard_shape(name), self._rows_per_rank(name)
        padded = part.new_zeros(num_rows, *shape[1:])
        padded[: len(part)] = part
        joined = part.new_empty(num_rows * self._layout.fsdp_size, *shape[1:])
        with collective(f"gather {name}"):
            dist.all_gather_into_tensor(joined, padded, group=self._layout.fsdp_group)
        return joined[: shape[0]]

    def _rows_per_rank(self, name: str) -> int:
        return -(-self._shard_shape(name)[0] // self._layout.fsdp_size)

    def _shard_shape(self, name: str) -> tuple[int, ...]:
        info, tp_size = self.infos[name], self._layout.tp_size
        return tuple(size // tp_size if dim == info.split_dim else size for dim, size in enumerate(info.shape))


def rows_of_rank(shard: Tensor, layout: Layout) -> Tensor:
    """Return this rank's rows of a tensor: as many as the other ranks', the last ranks fewer or none."""
    num_rows = -(-len(shard) // layout.fsdp_size)
    return shard[layout.fsdp_rank * num_rows : (layout.fsdp_rank + 1) * num_rows]


def local_rows(tensor: Any) -> Tensor:
    """Return this rank's rows of a DTensor; with gradients enabled, `to_local` would return a new view at each call."""
    rows: Tensor = tensor.to_local()
    return rows
