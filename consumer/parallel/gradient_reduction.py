"""Sum gradients over all ranks, unscaled and in float32, once per optimizer step.

Autograd accumulates over micro-batches in float32 for every weight precision. Then come three sums, in any order: over
data-parallel ranks; over tensor-parallel ranks, for parameters of which each computes a partial gradient; over the
first and last pipeline stage, for tied embeddings. Nothing is averaged.

With ZeRO each data-parallel rank keeps the slice that its optimizer updates: ZeRO stage 1 reduces at the end of the
step, stage 2 during the backward, so that no rank holds a full gradient (all ranks must run equally many backwards).
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from consumer.parallel.layout import Layout
from consumer.parallel.parameters import LocalParameters, padded_rows

AnyTensor = TypeVar("AnyTensor", bound=Tensor)

BUCKET_ELEMENTS = 2**24  # of one collective: 64 MiB


def accumulate_in_float32(model: nn.Module) -> None:
    """Set the dtype of gradients to float32: a bfloat16 sum over hundreds of micro-batches would lose precision."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad_dtype = torch.float32


class GradientReducer:
    """Reduce the gradients between backward and optimizer step."""

    def __init__(
        self, parameters: LocalParameters, layout: Layout, *, tied_group: dist.ProcessGroup | None = None
    ) -> None:
        """Store the arguments; `tied_group` joins the two pipeline stages of a tied embedding, None on other ranks."""
        self._parameters = parameters
        self._layout = layout
        self._tied_group = tied_group
        self._names = {id(parameter): name for name, parameter in parameters.trained.items()}
        self._slices: dict[str, Tensor] = {}  # ZeRO: summed over data-parallel ranks
        self._pending: list[nn.Parameter] = []  # ZeRO 2: full gradients until a bucket is complete
        if layout.is_partitioned and layout.zero_stage == 2:
            for parameter in parameters.trained.values():
                parameter.register_post_accumulate_grad_hook(self._take)

    def after_backward(self) -> None:
        """Reduce pending gradients; to be called after each micro-batch's backward."""
        self._cut(self._pending)
        self._pending = []

    def reduce(self) -> dict[str, Tensor]:
        """Sum over all ranks; collective.

        Returns: float32 gradients by parameter name, of the shapes that this rank's optimizer updates.
        """
        layout = self._layout
        if layout.is_partitioned:
            if layout.zero_stage == 1:
                self._cut(_with_gradient(self._parameters.trained.values()))
            gradients = {name: self._slice(name) for name in self._parameters.trained}
        else:
            held = _with_gradient(self._parameters.trained.values())
            gradients = {self._names[id(p)]: p.grad for p in held if p.grad is not None}
            if layout.dp_group is not None:
                sum_in_place(list(gradients.values()), layout.dp_group)
        if layout.tp_group is not None:
            partial = [gradient for name, gradient in gradients.items() if self._parameters.infos[name].is_partial]
            sum_in_place(partial, layout.tp_group)
        if self._tied_group is not None:
            tied = [gradient for name, gradient in gradients.items() if self._parameters.infos[name].tied_name]
            sum_in_place(tied, self._tied_group)
        return gradients

    def forget(self) -> None:
        """Clear all gradients after the optimizer step."""
        self._slices.clear()
        for parameter in self._parameters.trained.values():
            parameter.grad = None

    def _take(self, parameter: Tensor) -> None:
        self._pending.append(parameter)  # type: ignore[arg-type]
        if sum(p.numel() for p in self._pending) >= BUCKET_ELEMENTS:
            self.after_backward()

    def _cut(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce-scatter gradients over data-parallel ranks into this rank's slices, and free the full ones."""
        for bucket in _buckets(parameters):
            rows = [padded_rows(p.grad, self._layout.dp_size) for p in bucket if p.grad is not None]
            joined = torch.cat(rows, dim=1)  # float32[dp, n]; dp_rank r keeps row r
            mine = joined.new_empty(joined.shape[1])
            dist.reduce_scatter_tensor(mine, joined.flatten(), group=self._layout.dp_group)
            for parameter, piece in zip(bucket, mine.split([row.shape[1] for row in rows]), strict=True):
                self._slice(self._names[id(parameter)]).add_(piece)
                parameter.grad = None

    def _slice(self, name: str) -> Tensor:
        if name not in self._slices:
            parameter = self._parameters.by_name[name]
            length = -(-parameter.numel() // self._layout.dp_size)
            self._slices[name] = torch.zeros(length, dtype=torch.float32, device=parameter.device)
        return self._slices[name]


def _with_gradient(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters; a missing gradient, on a rank without samples, becomes zero."""
    held = list(parameters)
    for parameter in held:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    return held


def sum_in_place(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
    """Add gradients up over a group, the same on all its ranks; collective."""
    for bucket in _buckets(gradients):
        if len(bucket) == 1:
            dist.all_reduce(bucket[0], group=group)
            continue
        joined = torch.cat([gradient.flatten() for gradient in bucket])
        dist.all_reduce(joined, group=group)
        pieces = joined.split([gradient.numel() for gradient in bucket])
        torch._foreach_copy_([gradient.view(-1) for gradient in bucket], list(pieces))


def _buckets(tensors: Iterable[AnyTensor]) -> Iterator[list[AnyTensor]]:
    """Group consecutive tensors up to BUCKET_ELEMENTS; a larger tensor is a bucket of its own."""
    bucket: list[AnyTensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
