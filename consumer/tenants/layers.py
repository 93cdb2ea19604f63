"""Have a frozen model's linear layers compute many models' pieces, each with the adapters of its own model.

y = W x + s B A x, of every row with its model's A and B. A layer multiplies piece by piece, or pieces of equal shape at
once (`products`), and adds the factors' gradients to their sums itself, in one order. Over tensor-parallel ranks the
sums are those of `consumer.parallel.rank_sums`. G pieces of a group, m rows of each, r rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from consumer.parallel.layout import Layout
from consumer.parallel.parameters import ParameterInfo
from consumer.tenants.adapter_set import AdapterSet
from consumer.tenants.pieces import Piece
from consumer.tenants.products import into_rank, times_own, times_shared, times_shared_back


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Hold consecutive pieces of a pass that have equally many rows and equal kinds of adapters."""

    start: int  # row of the pass
    rows: int  # of each piece
    pieces: tuple[Piece, ...]
    sets: tuple[AdapterSet, ...]  # of each piece; empty: no adapters

    @property
    def end(self) -> int:
        """Return the row after its last."""
        return self.start + self.rows * len(self.pieces)

    def of(self, flat: Tensor) -> Tensor:
        """Return this group's rows [G, m, ...] of those of a pass [L, ...]."""
        return flat[self.start : self.end].unflatten(0, (len(self.pieces), self.rows))

    def has(self, layer: str) -> bool:
        """Return True if its models have an adapter of this layer."""
        return bool(self.sets) and layer in self.sets[0].layers

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return self.sets[0].spec.scale

    def stacked(self, layer: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factors of a layer, [G, r, in] and [G, out, r]."""
        factors = [each.layers[layer] for each in self.sets]
        return torch.stack([each.a for each in factors]).to(dtype), torch.stack([each.b for each in factors]).to(dtype)

    def add_gradients(self, layer: str, a: Tensor, b: Tensor) -> None:
        """Add gradients of a layer's factors, [G, r, in] and [G, out, r]."""
        factors = [each.layers[layer] for each in self.sets]
        torch._foreach_add_(
            [each.grad_a for each in factors] + [each.grad_b for each in factors], [*a.float(), *b.float()]
        )


def groups_of(pieces: Sequence[Piece], sets: Sequence[AdapterSet | None]) -> tuple[Group, ...]:
    """Return the groups of a pass's pieces, in order. `sets`: of each piece's model; None of a blank piece."""
    found, start = list[Group](), 0
    pairs = list(zip(pieces, sets, strict=True))
    while pairs:
        first, own = pairs[0]
        rows, kind = len(first.token_ids), None if own is None else own.kind
        same = [each for each in pairs if len(each[0].token_ids) == rows and (each[1] and each[1].kind) == kind]
        pairs = [each for each in pairs if each not in same]
        chosen = tuple(each for _, each in same if each is not None)
        found.append(Group(start, rows, tuple(piece for piece, _ in same), chosen))
        start = found[-1].end
    return tuple(found)


class TenantLayers:
    """Hold what the layers of a model compute: the groups of the pass that is going on."""

    def __init__(self) -> None:
        self.groups: tuple[Group, ...] = ()

    @contextmanager
    def computing(self, groups: tuple[Group, ...]) -> Iterator[None]:
        """Compute these groups, forward and backward."""
        self.groups = groups
        try:
            yield
        finally:
            self.groups = ()

    def install(self, model: nn.Module, infos: Sequence[ParameterInfo], names: Sequence[str], layout: Layout) -> None:
        """Replace the forward of these linear layers; the embedding's output begins the gradient.

        Args:
            model: this rank's part of it.
            infos: of all parameters.
            names: of all linear layers but the head.
            layout: of this rank.
        """
        by_name = {info.name: info for info in infos}
        for name in names:
            module: Any = model.get_submodule(name)
            module.tenant_layer = _Layer(self, name, by_name[f"{name}.weight"].split_dim, layout)
            module.forward = MethodType(_forward, module)
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        embedding.register_forward_hook(lambda _, __, out: out.requires_grad_(torch.is_grad_enabled()))


class _Layer:
    """Name a layer and how it is cut."""

    def __init__(self, owner: TenantLayers, name: str, split_dim: int | None, layout: Layout) -> None:
        self.owner, self.name = owner, name
        self.sum_forward = layout.tp_group if split_dim == 1 else None  # cut by its input
        self.sum_backward = layout.tp_group if split_dim == 0 else None  # cut by its output


def _forward(module: Any, inputs: Tensor) -> Tensor:
    layer: _Layer = module.tenant_layer
    return _Linear.apply(inputs, module.weight, module.bias, layer, layer.owner.groups)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, layer: _Layer, groups: tuple[Group, ...]
    ) -> Tensor:
        rows = inputs.flatten(0, -2)  # [L, in]
        own_bias, later_bias = (bias, None) if layer.sum_forward is None else (None, bias)
        parts, shorts = list[Tensor](), list[Tensor | None]()
        for group in groups:
            out, short = summed(times_shared(group.of(rows), weight, own_bias), layer.sum_forward), None
            if later_bias is not None:
                out += later_bias
            if group.has(layer.name):
                a, b = group.stacked(layer.name, rows.dtype)
                short = summed(into_rank(group.of(rows), a), layer.sum_forward).mul_(group.scale)
                out += times_own(short, b.transpose(1, 2))
            parts.append(out)
            shorts.append(short)
        ctx.save_for_backward(inputs, weight, *shorts)
        ctx.layer, ctx.groups = layer, groups
        return _joined(parts).view(*inputs.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, *shorts = ctx.saved_tensors
        layer: _Layer = ctx.layer
        rows, grad_rows = inputs.flatten(0, -2), gradient.flatten(0, -2).contiguous()
        parts = list[Tensor]()
        for group, short in zip(ctx.groups, shorts, strict=True):
            own = group.of(grad_rows)
            grad_inputs = summed(times_shared_back(own, weight), layer.sum_backward)
            parts.append(grad_inputs)
            if short is None:
                continue
            a, b = group.stacked(layer.name, rows.dtype)
            grad_short = summed(into_rank(own, b.transpose(1, 2)), layer.sum_backward).mul_(group.scale)
            grad_inputs += times_own(grad_short, a)
            grad_a = times_own(grad_short.transpose(1, 2), group.of(rows))
            grad_b = into_rank(own.transpose(1, 2), short.transpose(1, 2))
            group.add_gradients(layer.name, grad_a, grad_b)
        return _joined(parts).view_as(inputs), None, None, None, None


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the groups' rows [L, N] of parts [G, m, N]."""
    rows = [part.flatten(0, 1) for part in parts]
    return rows[0] if len(rows) == 1 else torch.cat(rows)


def summed(values: Tensor, group: dist.ProcessGroup | None, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce values [G, ...] over the group's ranks, in float32; they are already whole without one.

    Of more than two ranks the order of a number's sum may depend on its place in the message: each piece has its own.
    """
    if group is None:
        return values
    total = values.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    for part in (total,) if dist.get_world_size(group) == 2 else total:
        dist.all_reduce(part, op, group)
    return total.to(values.dtype)
