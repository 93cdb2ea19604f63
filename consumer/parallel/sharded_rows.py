"""Hold this rank's rows of a model's parameters, as FSDP2 shards them, and convert between rows and full tensors.

A full tensor is first cut over tensor-parallel ranks, experts over expert-parallel ones; of the shard, the ranks of a
group hold equally many rows (dimension 0) each, the last ones fewer or none.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from coati_rl.ops.gradient_sketch import ShardPlace, place_of
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import ParameterInfo, cut_of, full_of_shards, shard_of
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
        is_first_shard = cut_of(self.infos[name], layout).dim is not None or layout.tp_rank == 0
        return is_first_shard and layout.is_first_copy

    def place(self, name: str) -> ShardPlace:
        """Return where this rank's rows are in the full tensor."""
        shape, cut, rows = self._shard_shape(name), cut_of(self.infos[name], self._layout), self._rows(name)
        return place_of(
            shape,
            start=rows.rank * rows.per_rank(shape[0]) * prod(shape[1:]),
            split_dim=cut.dim if cut.size > 1 else None,
            offset=0 if cut.dim is None else cut.rank * shape[cut.dim],
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
        return self._rows(name).own(shard_of(self.infos[name], full, self._layout))

    def _joined_rows(self, name: str, part: Tensor) -> Tensor:
        shape, rows = self._shard_shape(name), self._rows(name)
        if rows.group is None:
            return part
        num_rows = rows.per_rank(shape[0])
        padded = part.new_zeros(num_rows, *shape[1:])
        padded[: len(part)] = part
        joined = part.new_empty(num_rows * rows.size, *shape[1:])
        with collective(f"gather {name}"):
            dist.all_gather_into_tensor(joined, padded, group=rows.group)
        return joined[: shape[0]]

    def _rows(self, name: str) -> "RowGroup":
        return row_group(self.infos[name], self._layout)

    def _shard_shape(self, name: str) -> tuple[int, ...]:
        info, cut = self.infos[name], cut_of(self.infos[name], self._layout)
        return tuple(size // cut.size if dim == cut.dim else size for dim, size in enumerate(info.shape))


class RowGroup(NamedTuple):
    """Say which ranks share the rows of a shard, in their order."""

    rank: int
    size: int
    group: dist.ProcessGroup | None  # None: this rank is alone

    def per_rank(self, num_rows: int) -> int:
        """Return how many of so many rows each rank holds, the last ones fewer or none."""
        return -(-num_rows // self.size)

    def own(self, shard: Tensor) -> Tensor:
        """Return this rank's rows of a tensor."""
        number = self.per_rank(len(shard))
        return shard[self.rank * number : (self.rank + 1) * number]


def row_group(info: ParameterInfo, layout: Layout) -> RowGroup:
    """Return the ranks that share a parameter's rows: of experts, those of a copy of the weights that hold them."""
    if info.is_expert:
        size = layout.fsdp_size // layout.ep_size
        return RowGroup(layout.fsdp_rank // layout.ep_size, size, layout.expert_group)
    return RowGroup(layout.fsdp_rank, layout.fsdp_size, layout.fsdp_group)


def local_rows(tensor: Any) -> Tensor:
    """Return this rank's rows of a DTensor; with gradients enabled, `to_local` would return a new view at each call."""
    rows: Tensor = tensor.to_local()
    return rows
