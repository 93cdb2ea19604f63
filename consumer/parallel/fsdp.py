"""Train with FSDP2: weights, gradients and optimizer states are sharded over all trainers, as in ZeRO stage 3.

`fully_shard` shards every parameter by rows (dimension 0), one part for each rank, and gathers a decoder layer for its
forward and its backward. The embedding, the last norm and the LM head belong to the root module, whose forward is
`policy_forward`: they are unsharded while the loss uses the head's weight.

Each backward ends with a reduce-scatter: an unscaled sum in float32, added to this rank's part. Reducing only after the
step's last micro-batch would keep a full float32 gradient on every rank, more memory than sharding saves. In bfloat16
the parameters themselves are the float32 masters and are rounded before they are gathered, so that no device holds a
full float32 master.
"""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from coati_rl.ops.gradient_sketch import ShardPlace, place_of
from consumer.models.policy_model import DTYPES, HeadWeights, PolicyInput, Precision, policy_forward
from consumer.models.scalar_head import scalar_head
from consumer.parallel.context_groups import destroy_context_groups, with_context_groups
from consumer.parallel.layout import Layout
from consumer.parallel.parallelism import accumulate_each, local_head, score_each
from consumer.parallel.parameters import ParameterInfo
from consumer.parallel.process_group import agree, collective, timeout_of_new_groups
from consumer.parallel.reduction import add_over_ranks, reduce_sums, sum_over_ranks


class FullyShardedParallelism:
    """Implement `Parallelism` with each model sharded over all ranks of the default group, which must exist."""

    def __init__(self, *, precision: Precision, device: torch.device, timeout_s: float, cp_size: int = 1) -> None:
        """Shard over all ranks, `cp_size` of which share each row; `timeout_s`: of the collectives of these."""
        group: Any = dist.group.WORLD
        layout = Layout(
            dp_rank=dist.get_rank(),
            dp_size=dist.get_world_size(),
            zero_stage=3,
            dp_group=group if dist.get_world_size() > 1 else None,
        )
        with timeout_of_new_groups(timeout_s), collective("create the process groups of the layout"):
            self.layout = with_context_groups(layout, cp_size)
        self.device = device
        self._precision = precision
        self._mesh = DeviceMesh.from_group(group, device.type)  # collectives use the group's timeout

    def layers_per_stage(self, model: PreTrainedModel) -> list[int]:
        """Return the model's number of layers: there is one stage."""
        return [model.config.num_hidden_layers]

    def shard(
        self,
        model: PreTrainedModel,
        infos: Sequence[ParameterInfo],
        optimizer: torch.optim.Optimizer | None,
        attach: Callable[[nn.Module], None] | None = None,
    ) -> "FullyShardedModel":
        """See `Parallelism`. Neither host nor device gets a copy of a whole parameter: only this rank's rows are read.

        The masters are what the files hold, already rounded to the model's precision as in every layout.
        """
        model.forward = policy_forward.__get__(model)
        if attach is not None:
            attach(model)
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[self._precision],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # hidden states have the right dtype; a micro-batch's arrays keep theirs
        )
        names = {id(parameter): name for name, parameter in model.named_parameters()}  # of the optimizer's parameters
        full = _take_data(model)
        with collective("shard the model"):
            for layer in [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]:
                fully_shard(layer, mesh=self._mesh, mp_policy=policy)
            fully_shard(model, mesh=self._mesh, mp_policy=policy)
            self._fill(model, full)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum, not an average
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks the pre-multiplied sum that FSDP2 would use
        parameters = ShardedRows(model, infos, self.layout, DTYPES[self._precision])
        for group in [] if optimizer is None else optimizer.param_groups:
            group["params"] = [parameters.local[names[id(parameter)]] for parameter in group["params"]]
        return FullyShardedModel(model, parameters, optimizer)

    def num_micro_batches(self, wanted: int) -> int:
        """Return the largest number over all ranks, since every forward gathers layers from all ranks."""
        number = torch.tensor(wanted, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def sum_over_ranks(self, value: float) -> float:
        """See `Parallelism`."""
        return sum_over_ranks(value, device=self.device)

    def add_over_ranks(self, values: Tensor) -> Tensor:
        """See `Parallelism`."""
        return add_over_ranks(values)

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """See `Parallelism`."""
        return reduce_sums(sums, device=self.device, group=self.layout.data_group)

    def broadcast_text(self, text: str | None) -> str:
        """Return the text unchanged: there is one sender."""
        return text or ""

    def agree(self, action: Callable[[], str | None] | None) -> list[str]:
        """See `Parallelism`."""
        return agree(action)

    def close(self) -> None:
        """Destroy the groups of context-parallel ranks; the default group stays."""
        destroy_context_groups(self.layout)

    def _fill(self, model: PreTrainedModel, full: dict[str, Tensor]) -> None:
        """Copy this rank's rows into the sharded parameters, which are on the meta device; takes them out of `full`."""
        rows = dict[int, nn.Parameter]()
        for name, parameter in model.named_parameters():
            whole: Any = full.pop(name)
            own = rows_of_rank(whole, self.layout).to(model.config.dtype)
            placed = DTensor.from_local(
                own.to(self.device, parameter.dtype, copy=True),
                self._mesh,
                [Shard(0)],
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            rows[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        names = model.named_parameters(remove_duplicate=False)  # a tied parameter stays one
        model.load_state_dict({name: rows[id(each)] for name, each in names}, strict=False, assign=True)


class ShardedRows:
    """Implement `ModelParameters`: each rank holds equally many rows of a parameter, the last ranks fewer or none.

    The parts are the float32 masters of a trained model, or the weights of a frozen model in its own dtype.
    """

    def __init__(
        self, model: PreTrainedModel, infos: Sequence[ParameterInfo], layout: Layout, weight_dtype: torch.dtype
    ) -> None:
        """Take `model` after sharding and before its first forward; it computes in `weight_dtype`."""
        self.dtensors = dict(model.named_parameters())  # a gathered module would list unsharded parameters
        self.infos = {info.name: info for info in infos}
        with torch.no_grad():
            self.local = {name: _local(parameter) for name, parameter in self.dtensors.items()}
        self.trained = {name: part for name, part in self.local.items() if self.dtensors[name].requires_grad}
        self._layout = layout
        self._weight_dtype = weight_dtype

    def counts_in_norm(self, name: str) -> bool:
        """Return True: no two ranks hold the same elements."""
        return True

    def place(self, name: str) -> ShardPlace:
        """Return where this rank's rows are in the full tensor."""
        shape = self.infos[name].shape
        return place_of(shape, start=self._layout.dp_rank * self._rows_per_rank(name) * prod(shape[1:]))

    def full_weight(self, name: str) -> Tensor:
        """Return the full weight, rounded before it is gathered; collective."""
        return self.full_state(name, self.local[name].to(self._weight_dtype))

    def weight_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's rows."""
        return rows_of_rank(full, self._layout)

    def full_state(self, name: str, part: Tensor) -> Tensor:
        """Gather the full tensor from each rank's rows; collective."""
        if self._layout.dp_group is None:
            return part
        shape, num_rows = self.infos[name].shape, self._rows_per_rank(name)
        padded = part.new_zeros(num_rows, *shape[1:])
        padded[: len(part)] = part
        joined = part.new_empty(num_rows * self._layout.dp_size, *shape[1:])
        with collective(f"gather {name}"):
            dist.all_gather_into_tensor(joined, padded, group=self._layout.dp_group)
        return joined[: shape[0]]

    def state_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's rows, the inverse of `full_state`."""
        return rows_of_rank(full, self._layout)

    def _rows_per_rank(self, name: str) -> int:
        return -(-self.infos[name].shape[0] // self._layout.dp_size)


class FullyShardedModel:
    """Implement `ShardedModel` with modules that gather their parameters when they run."""

    def __init__(
        self, module: PreTrainedModel, parameters: ShardedRows, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """Take the sharded module, and the optimizer of this rank's rows as plain tensors."""
        self.parameters = parameters
        self._module: Any = module
        # A tied head's weight has the name of the embedding's.
        names = {id(parameter): name for name, parameter in parameters.dtensors.items()}
        has_lm_head = scalar_head(module) is None
        self._head_names = [names.get(id(each)) for each in local_head(module)] if has_lm_head else [None, None]
        self._optimizer: Any = optimizer

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        """See `ShardedModel`."""
        try:
            return score_each(self._module, inputs)
        finally:
            # The root stays unsharded after a forward. Kept so, it would not see later changes of the weights.
            self._module.reshard()

    def head_weights(self) -> HeadWeights:
        """See `ShardedModel`."""
        weight, bias = (None if name is None else self.parameters.full_weight(name) for name in self._head_names)
        if weight is None:
            raise ValueError("the LM head is none of the model's parameters")
        return HeadWeights(weight, bias)

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        """See `ShardedModel`; every rank needs the same number of inputs."""
        return accumulate_each(self._module, inputs)

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Return the sums that the backwards have accumulated; zeros where there is no gradient."""
        with torch.no_grad():
            return {
                name: torch.zeros_like(self.parameters.local[name]) if p.grad is None else _local(p.grad)
                for name, p in self.parameters.dtensors.items()
                if p.requires_grad
            }

    def forget_gradients(self) -> None:
        """See `ShardedModel`."""
        for parameter in (*self.parameters.dtensors.values(), *self.parameters.local.values()):
            parameter.grad = None

    def masters(self) -> dict[str, Tensor]:
        """See `ShardedModel`."""
        return dict(self.parameters.trained)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """See `ShardedModel`; the next gather rounds the updated masters."""
        for name, gradient in gradients.items():
            self.parameters.local[name].grad = gradient
        self._optimizer.step()


def rows_of_rank(full: Tensor, layout: Layout) -> Tensor:
    """Return this rank's rows of a full tensor: as many as the other ranks', the last ranks fewer or none."""
    num_rows = -(-len(full) // layout.dp_size)
    return full[layout.dp_rank * num_rows : (layout.dp_rank + 1) * num_rows]


def _take_data(model: PreTrainedModel) -> dict[str, Tensor]:
    """Move the parameters' data out of a model, by name; it gets parameters on the meta device instead.

    Args:
        model: whole; a tied parameter stays one. New parameters that are trained are float32.
    """
    full = {name: parameter.detach() for name, parameter in model.named_parameters()}
    empty = dict[int, nn.Parameter]()
    for module in model.modules():
        for key, parameter in module.named_parameters(recurse=False):
            dtype = torch.float32 if parameter.requires_grad else model.config.dtype
            made = torch.empty_like(parameter, dtype=dtype, device="meta")
            new = empty.setdefault(id(parameter), nn.Parameter(made, requires_grad=parameter.requires_grad))
            setattr(module, key, new)
            parameter.data = parameter.data.new_empty(0)  # an optimizer refers to it
    return full


def _local(tensor: Any) -> Tensor:
    """Return this rank's rows of a DTensor; with gradients enabled, `to_local` would return a new view at each call."""
    rows: Tensor = tensor.to_local()
    return rows
