"""Train with FSDP2: weights, gradients and optimizer states are sharded over trainers, as in ZeRO stage 3.

All data-parallel ranks share one copy of the weights, or `fsdp_size` of them each of several. With tensor parallelism
what is sharded are a rank's shards of the tensors (`tensor_shards`).

`fully_shard` shards every parameter by rows (dimension 0), one part for each rank, and gathers a decoder layer for its
forward and its backward. The embedding, the last norm and the LM head belong to the root module, whose forward is
`policy_forward`: they are unsharded while the loss uses the head's weight.

Each backward ends with a reduce-scatter: an unscaled sum in float32, added to this rank's part. Reducing only after the
step's last micro-batch would keep a full float32 gradient on every rank, more memory than sharding saves. What several
copies of the weights, or tensor-parallel ranks, have of a gradient is summed once, at the end of the step. In bfloat16
the parameters themselves are the float32 masters and are rounded before they are gathered, so that no device holds a
full float32 master.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from consumer.models.policy_model import DTYPES, HeadWeights, PolicyInput, Precision, policy_forward
from consumer.models.scalar_head import scalar_head
from consumer.parallel.expert_exchange import share_experts_out
from consumer.parallel.fsdp_groups import destroy_fsdp_groups, fsdp_layout
from consumer.parallel.gradient_reduction import sum_in_place
from consumer.parallel.layout import Layout
from consumer.parallel.parallelism import accumulate_each, local_head, score_each
from consumer.parallel.parameters import ParameterInfo
from consumer.parallel.process_group import agree, collective, timeout_of_new_groups
from consumer.parallel.reduction import add_over_ranks, reduce_sums, sum_over_ranks
from consumer.parallel.sharded_rows import ShardedRows, local_rows, row_group
from consumer.parallel.tensor_shards import cut_tensors


class FullyShardedParallelism:
    """Implement `Parallelism` with each model sharded over the ranks of the default group, which must exist."""

    def __init__(
        self,
        *,
        precision: Precision,
        device: torch.device,
        timeout_s: float,
        tp_size: int = 1,
        cp_size: int = 1,
        fsdp_size: int = 0,
        ep_size: int = 1,
    ) -> None:
        """Create the process groups; `timeout_s` is the time limit of their collectives. Sizes: see `fsdp_layout`."""
        with timeout_of_new_groups(timeout_s), collective("create the process groups of the layout"):
            self.layout, self._shards = fsdp_layout(
                tp_size=tp_size, cp_size=cp_size, fsdp_size=fsdp_size, ep_size=ep_size
            )
        self.device = device
        self._precision = precision
        # Collectives use the groups' timeout.
        self._mesh, self._expert_mesh = (DeviceMesh.from_group(group, device.type) for group in self._shards)

    def layers_per_stage(self, model: PreTrainedModel) -> list[int]:
        """Return the model's number of layers: there is one stage."""
        return [model.config.get_text_config().num_hidden_layers]

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
        model.forward = partial(policy_forward, model, tp_group=self.layout.tp_group)
        if self.layout.tp_group is not None:
            cut_tensors(model, self.layout.tp_group)
        ep_group = self.layout.ep_group
        experts = [] if ep_group is None else share_experts_out(model, ep_group)
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
            for each in experts:  # before the layers that hold them
                fully_shard(each, mesh=self._expert_mesh, mp_policy=policy)
            for layer in [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]:
                fully_shard(layer, mesh=self._mesh, mp_policy=policy)
            fully_shard(model, mesh=self._mesh, mp_policy=policy)
            self._fill(model, infos, full)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)  # a sum, not an average
                module.set_force_sum_reduction_for_comms(True)  # gloo lacks the pre-multiplied sum that FSDP2 would use
        parameters = ShardedRows(model, infos, self.layout, DTYPES[self._precision])
        for group in [] if optimizer is None else optimizer.param_groups:
            group["params"] = [parameters.local[names[id(parameter)]] for parameter in group["params"]]
        return FullyShardedModel(model, parameters, optimizer, self.layout)

    def num_micro_batches(self, wanted: int) -> int:
        """Return the largest number over all ranks, since every forward gathers layers from other ranks."""
        number = torch.tensor(wanted, device=self.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        return int(number)

    def sum_over_ranks(self, value: float) -> float:
        return sum_over_ranks(value, device=self.device)

    def add_over_ranks(self, values: Tensor) -> Tensor:
        return add_over_ranks(values)

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        return reduce_sums(sums, device=self.device, group=self.layout.data_group)

    def broadcast_text(self, text: str | None) -> str:
        """Return the text unchanged: there is one sender."""
        return text or ""

    def agree(self, action: Callable[[], str | None] | None) -> list[str]:
        return agree(action)

    def close(self) -> None:
        """Destroy the groups of the layout; the default group stays."""
        destroy_fsdp_groups(self.layout, self._shards)

    def _fill(self, model: PreTrainedModel, infos: Sequence[ParameterInfo], full: dict[str, Tensor]) -> None:
        """Copy this rank's rows into the sharded parameters, which are on the meta device; takes them out of `full`."""
        rows, info_of = dict[int, nn.Parameter](), {info.name: info for info in infos}
        for name, parameter in model.named_parameters():
            own = row_group(info_of[name], self.layout).own(full.pop(name)).to(model.config.dtype)
            placed = DTensor.from_local(
                own.to(self.device, parameter.dtype, copy=True, memory_format=torch.contiguous_format),
                self._expert_mesh if info_of[name].is_expert else self._mesh,
                [Shard(0)],
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            rows[id(parameter)] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
        names = model.named_parameters(remove_duplicate=False)  # a tied parameter stays one
        model.load_state_dict({name: rows[id(each)] for name, each in names}, strict=False, assign=True)


class FullyShardedModel:
    """Implement `ShardedModel` with modules that gather their parameters when they run."""

    def __init__(
        self,
        module: PreTrainedModel,
        parameters: ShardedRows,
        optimizer: torch.optim.Optimizer | None,
        layout: Layout,
    ) -> None:
        """Take the sharded module, and the optimizer of this rank's rows as plain tensors."""
        self.parameters = parameters
        self._module: Any = module
        self._layout = layout
        # A tied head's weight has the name of the embedding's.
        names = {id(parameter): name for name, parameter in parameters.dtensors.items()}
        has_lm_head = scalar_head(module) is None
        self._head_names = [names.get(id(each)) for each in local_head(module)] if has_lm_head else [None, None]
        self._optimizer: Any = optimizer

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        try:
            return score_each(self._module, inputs)
        finally:
            # The root stays unsharded after a forward. Kept so, it would not see later changes of the weights.
            self._module.reshard()

    def head_weights(self) -> HeadWeights:
        weight, bias = (None if name is None else self.parameters.shard_weight(name) for name in self._head_names)
        if weight is None:
            raise ValueError("the LM head is none of the model's parameters")
        return HeadWeights(weight, bias)

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        """See `ShardedModel`; every rank needs the same number of inputs."""
        return accumulate_each(self._module, inputs)

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Sum over copies and tensor-parallel ranks what the backwards have accumulated; no gradient is a zero."""
        layout, infos = self._layout, self.parameters.infos
        with torch.no_grad():
            gradients = {
                name: torch.zeros_like(self.parameters.local[name]) if p.grad is None else local_rows(p.grad)
                for name, p in self.parameters.dtensors.items()
                if p.requires_grad
            }
            if layout.copy_group is not None:
                sum_in_place([*gradients.values()], layout.copy_group)
            if layout.tp_group is not None:
                partial_ones = [gradient for name, gradient in gradients.items() if infos[name].is_partial]
                sum_in_place(partial_ones, layout.tp_group)
        return gradients

    def forget_gradients(self) -> None:
        for parameter in (*self.parameters.dtensors.values(), *self.parameters.local.values()):
            parameter.grad = None

    def masters(self) -> dict[str, Tensor]:
        return dict(self.parameters.trained)

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """See `ShardedModel`; the next gather rounds the updated masters."""
        for name, gradient in gradients.items():
            self.parameters.local[name].grad = gradient
        self._optimizer.step()


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
