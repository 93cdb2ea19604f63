"""Define the interface by which a trainer shards and runs models, reduces gradients and synchronises ranks.

A `Parallelism` arranges the ranks and turns each model into a `ShardedModel`, this rank's part of it. Implementations
are `single_process`, `hybrid` (ColossalAI) and `fsdp` (FSDP2); they share functions, not a base class. A gradient is
always the unscaled sum over the global batch, in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.algorithms.sums import merge_sums
from coati_rl.ops.gradient_sketch import ShardPlace
from consumer.models.policy_model import HeadWeights, PolicyInput
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import ParameterInfo


class ModelParameters(Protocol):
    """Hold this rank's parts of a model's parameters by Hugging Face name; convert between parts and full tensors.

    Methods that gather parts are collective over the ranks that hold them, in the same order of names.
    """

    @property
    def infos(self) -> Mapping[str, ParameterInfo]:
        """Return the parameters of which this rank holds a part, by name."""

    @property
    def local(self) -> Mapping[str, Tensor]:
        """Return the parts themselves by name; every optimizer step changes them."""

    def counts_in_norm(self, name: str) -> bool:
        """Return True on exactly one of the ranks that hold the same elements of a gradient."""

    def place(self, name: str) -> ShardPlace:
        """Return where this rank's part of a gradient is in the full one."""

    @property
    def trained(self) -> Mapping[str, Tensor]:
        """Return those parts that the optimizer changes, by name; none of a frozen model."""

    def full_weight(self, name: str) -> Tensor:
        """Return the full weight in the dtype that the model computes in; collective."""

    def weight_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full weight, of the shape of `local`."""

    def full_state(self, name: str, part: Tensor) -> Tensor:
        """Gather the full tensor of which each rank's optimizer holds a part; collective."""

    def state_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor, the inverse of `full_state`."""


class ShardedModel(Protocol):
    """Run and train this rank's part of one model. A frozen model has no optimizer and only supports `score`."""

    @property
    def parameters(self) -> ModelParameters:
        """Return this rank's parameters."""

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        """Return what `policy_forward` does without a loss, for each; an empty list without the head.

        Call it under `no_grad`.
        """

    def head_weights(self) -> HeadWeights | None:
        """Return the LM head, or this tensor-parallel rank's rows of it; None without the head.

        Collective where its rows are sharded over data-parallel ranks: they are gathered, and held by the caller.
        """

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        """Accumulate the gradient of the summed loss. Returns: the loss's reported sums; empty without the head."""

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Sum the gradients over all ranks; collective, once per optimizer step.

        Returns: float32 gradients by parameter name, of the shapes of this rank's masters.
        """

    def forget_gradients(self) -> None:
        """Clear all gradients after the optimizer step."""

    def masters(self) -> dict[str, Tensor]:
        """Return the float32 tensors that the optimizer updates, by parameter name."""

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Update the masters with these gradients, and the model's weights with the masters."""


class Parallelism(Protocol):
    """Arrange the trainers' ranks; all methods are collective over them, except where noted."""

    @property
    def layout(self) -> Layout:
        """Return this rank's layout."""

    @property
    def device(self) -> torch.device:
        """Return the device that this rank computes on."""

    def layers_per_stage(self, model: PreTrainedModel) -> list[int]:
        """Return the number of decoder layers of each pipeline stage. Raises: ConfigError if it cannot be split so."""

    def shard(
        self,
        model: PreTrainedModel,
        infos: Sequence[ParameterInfo],
        optimizer: torch.optim.Optimizer | None,
        attach: Callable[[nn.Module], None] | None = None,
    ) -> ShardedModel:
        """Shard a model that is on the CPU; no device ever holds the full model.

        Args:
            model: afterwards it has only this rank's part, on its device.
            infos: its parameters, the adapters' among them.
            optimizer: over the parameters that are trained, afterwards over this rank's masters; None: the model is
                frozen.
            attach: adds adapters to this rank's part of the model; None: it has none.
        """

    def num_micro_batches(self, wanted: int) -> int:
        """Return how many micro-batches this rank must run if it has `wanted`; the rest are blank ones."""

    def sum_over_ranks(self, value: float) -> float:
        """Return the sum of all ranks' numbers, the same on every rank."""

    def add_over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of all ranks' tensors on its device, element by element; `values` may be changed."""

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Return reported sums over all ranks with different samples; empty without the LM head."""

    def broadcast_text(self, text: str | None) -> str:
        """Broadcast a text from sender 0 to all senders; collective over them. `text`: None on the others."""

    def agree(self, action: Callable[[], str | None] | None) -> list[str]:
        """Run this rank's action, if any, and check that the other ranks' actions succeeded.

        Returns: the text that each rank's action returned, by rank; empty for none.
        Raises: RunError on every rank if one failed.
        """

    def close(self) -> None:
        """Destroy the process groups that this object created."""


def local_head(module: Any) -> HeadWeights:
    """Return a model's LM head as its module holds it."""
    head = module.get_output_embeddings()
    return HeadWeights(head.weight, head.bias)


def score_each(module: nn.Module, inputs: Sequence[PolicyInput]) -> list[Tensor]:
    """Run one forward per input, without pipeline. `module`: its forward is `policy_forward`."""
    return [module(each)[0] for each in inputs]


def accumulate_each(
    module: nn.Module, inputs: Sequence[PolicyInput], after_backward: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Run forward and backward of each micro-batch in turn. Returns: the loss's reported sums."""
    sums: dict[str, Tensor] = {}
    for each in inputs:
        loss, terms = module(each)
        loss.backward()
        after_backward()
        sums = merge_sums(sums, terms)
    return sums
