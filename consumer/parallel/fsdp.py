"""Train on FSDP2: weights, gradients and optimizer states are sharded over all trainers, as in ZeRO stage 3.

`fully_shard` cuts every parameter by rows (dimension 0), one part for each rank, and gathers a decoder layer when it is
due, forward and backward. The embedding, the last norm and the LM head belong to the root module, whose forward is
`policy_forward`: they are whole while the loss uses the head's weight.

Each backward ends in a reduce-scatter: a plain sum in float32, added to this rank's part. Leaving that to the step's
last micro-batch would keep a whole float32 gradient on every rank, more memory than sharding saves. In bfloat16 the
parameters themselves are the float32 masters and are rounded before they are gathered: on no device is a float32 master
whole.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from consumer.models.policy_model import DTYPES, PolicyInput, Precision, policy_forward
from consumer.parallel.layout import Layout
from consumer.parallel.parallelism import accumulate_each, score_each
from consumer.parallel.parameters import ParameterInfo
from consumer.parallel.process_group import agree, collective
from consumer.parallel.reduction import reduce_sums, sum_over_ranks


class FullyShardedParallelism:
    """Implement `Parallelism` on all ranks of the default group, which must exist: they hold one copy of each model."""

    def __init__(self, *, precision: Precision, device: torch.device) -> None:
        group: Any = dist.group.WORLD
        self.layout = Layout(
            dp_rank=dist.get_rank(),
            dp_size=dist.get_world_size(),
            zero_stage=3,
            dp_group=group if dist.get_world_size() > 1 else None,
        )
        self.device = device
        self._precision = precision
        self._mesh = DeviceMesh.from_group(group, device.type)  # the group's deadline is that of its collectives

    def layers_per_stage(self, model: PreTrainedModel) -> list[int]:
        """All in one."""
        return [model.config.num_hidden_layers]

    def shard(
        self, model: PreTrainedModel, infos: Sequence[ParameterInfo], optimizer: torch.optim.Optimizer | None
    ) -> "FullyShardedModel":
        """See `Parallelism`. Modules go to the device one by one, so that it never holds the whole model."""
        model.forward = policy_forward.__get__(model)
        if optimizer is not None:
            for parameter in model.parameters():  # rounded to the model's precision before, as in every layout
                parameter.data = parameter.data.float()
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[self._precision],
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # hidden states have the right dtype; a micro-batch's arrays keep theirs
        )
        with collective("cut up the model"):
            for layer in [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]:
                fully_shard(layer, mesh=self._mesh, mp_policy=policy)
            fully_shard(model, mesh=self._mesh, mp_policy=policy)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum, not an average
                module.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that multiplies
        return FullyShardedModel(model, ShardedRows(model, infos, self.layout, DTYPES[self._precision]), optimizer)

    def num_micro_batches(self, wanted: int) -> int:
        """As many as the rank with the most has: each gathers layers that the others hold."""
        number = torch.tensor(wanted, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def sum_over_ranks(self, value: float) -> float:
        """See `Parallelism`."""
        return sum_over_ranks(value, device=self.device)

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """See `Parallelism`."""
        return reduce_sums(sums, device=self.device, group=self.layout.dp_group)

    def broadcast_text(self, text: str | None) -> str:
        """The text itself: there is one sender."""
        return text or ""

    def agree(self, action: Callable[[], None] | None) -> None:
        """See `Parallelism`."""
        agree(action)

    def close(self) -> None:
        """Nothing to leave: the default group stays."""


class ShardedRows:
    """Implement `ModelParameters`: each rank holds equally many rows of a parameter, the last ones fewer or none.

    The parts are the float32 masters of what trains, and a frozen model's weights in its own dtype.
    """

    def __init__(
        self, model: PreTrainedModel, infos: Sequence[ParameterInfo], layout: Layout, weight_dtype: torch.dtype
    ) -> None:
        """`model`: after sharding, before its first forward. `weight_dtype`: that it computes in."""
        self.dtensors = dict(model.named_parameters())  # while a module is gathered it shows others
        self.infos = {info.name: info for info in infos}
        with torch.no_grad():
            self.local = {name: _local(parameter) for name, parameter in self.dtensors.items()}
        self._layout = layout
        self._weight_dtype = weight_dtype

    def counts_in_norm(self, name: str) -> bool:
        """True: no two ranks hold the same numbers."""
        return True

    def full_weight(self, name: str) -> Tensor:
        """The whole weight, rounded before it is gathered."""
        return self.full_state(name, self.local[name].to(self._weight_dtype))

    def full_state(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor from each rank's rows; collective."""
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
        """The inverse: this rank's rows."""
        first, num_rows = self._layout.dp_rank * self._rows_per_rank(name), self._rows_per_rank(name)
        return full[first : first + num_rows]

    def _rows_per_rank(self, name: str) -> int:
        return -(-self.infos[name].shape[0] // self._layout.dp_size)


class FullyShardedModel:
    """Implement `ShardedModel` with modules that gather their parameters when they run."""

    def __init__(
        self, module: PreTrainedModel, parameters: ShardedRows, optimizer: torch.optim.Optimizer | None
    ) -> None:
        """`module`: sharded. `optimizer`: see `Parallelism.shard`; it steps on this rank's rows as plain tensors."""
        self.parameters = parameters
        self._module: Any = module
        self._optimizer: Any = optimizer
        if optimizer is not None:
            optimizer.param_groups[0]["params"] = list(parameters.local.values())

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        """See `ShardedModel`."""
        try:
            return score_each(self._module, inputs)
        finally:
            # Between forwards the root stays whole. Kept beyond them it would hide every change of the weights.
            self._module.reshard()

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        """See `ShardedModel`; every rank runs equally many."""
        return accumulate_each(self._module, inputs)

    def reduce_gradients(self) -> dict[str, Tensor]:
        """What the backwards have summed already; zeros where none arrived."""
        with torch.no_grad():
            return {
                name: torch.zeros_like(self.parameters.local[name]) if p.grad is None else _local(p.grad)
                for name, p in self.parameters.dtensors.items()
            }

    def forget_gradients(self) -> None:
        """See `ShardedModel`."""
        for parameter in (*self.parameters.dtensors.values(), *self.parameters.local.values()):
            parameter.grad = None

    def masters(self) -> dict[str, Tensor]:
        """See `ShardedModel`."""
        return dict(self.parameters.local)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """See `ShardedModel`; the next gather rounds what is stepped on."""
        for name, gradient in gradients.items():
            self.parameters.local[name].grad = gradient
        self._optimizer.step()


def _local(tensor: Any) -> Tensor:
    """This rank's rows of a DTensor. Called without gradient: else it would be a view, and another one at each call."""
    rows: Tensor = tensor.to_local()
    return rows
