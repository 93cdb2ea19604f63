"""Define what a parallelism does for the models of a trainer: shard, run, reduce, agree.

A `Parallelism` arranges the ranks and turns each model into a `ShardedModel`, this rank's part of it. Implementations
are `single_process`, `hybrid_parallelism` (ColossalAI) and `fsdp_parallelism` (FSDP2); they share functions, not a base
class. A gradient is always the plain sum over the global batch, in float32.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.algorithms.sums import merge_sums
from consumer.models.policy_model import PolicyInput
from consumer.parallel.layout import Layout
from consumer.parallel.parameters import ParameterInfo


class ModelParameters(Protocol):
    """Hold this rank's parts of a model's parameters by Hugging Face name; turn parts into whole tensors and back.

    What joins parts is collective over the ranks that hold them, in the same order of names.
    """

    @property
    def infos(self) -> Mapping[str, ParameterInfo]:
        """Parameters of which this rank holds a part."""

    @property
    def local(self) -> Mapping[str, Tensor]:
        """The parts themselves, which change with every step."""

    def counts_in_norm(self, name: str) -> bool:
        """True on exactly one of the ranks that hold the same numbers of a gradient."""

    def full_weight(self, name: str) -> Tensor:
        """The whole weight in the dtype that the model computes in; collective."""

    def full_state(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor of which each rank's optimizer holds a part; collective."""

    def state_part(self, name: str, full: Tensor) -> Tensor:
        """The inverse of `full_state`: what this rank's optimizer holds."""


class ShardedModel(Protocol):
    """Run and train this rank's part of one model. All but `score` need an optimizer, which frozen models lack."""

    @property
    def parameters(self) -> ModelParameters:
        """Its parameters."""

    def score(self, inputs: Sequence[PolicyInput]) -> list[Tensor]:
        """Log-probabilities, a float32[R, M] each; none on ranks without the head. Called without gradient."""

    def accumulate(self, inputs: Sequence[PolicyInput]) -> dict[str, Tensor]:
        """Add the gradient of the summed loss. Returns: the sums that the loss reports; none without the head."""

    def reduce_gradients(self) -> dict[str, Tensor]:
        """Sum over all ranks; collective, once per optimizer step.

        Returns: parameter name to float32 gradient, of the shape of this rank's master.
        """

    def forget_gradients(self) -> None:
        """After the step: the next one starts from nothing."""

    def masters(self) -> dict[str, Tensor]:
        """Parameter name to the float32 tensor that the optimizer steps on."""

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """Let the optimizer step on these, and the model compute with what it arrived at."""


class Parallelism(Protocol):
    """Arrange the trainers' ranks; all methods are collective over them, except where noted."""

    @property
    def layout(self) -> Layout:
        """This rank's place."""

    @property
    def device(self) -> torch.device:
        """The device that this rank computes on."""

    def layers_per_stage(self, model: PreTrainedModel) -> list[int]:
        """Decoder layers of each pipeline stage. Raises: ConfigError if the model cannot be cut into these stages."""

    def shard(
        self, model: PreTrainedModel, infos: Sequence[ParameterInfo], optimizer: torch.optim.Optimizer | None
    ) -> ShardedModel:
        """Cut up a model, which is on the CPU. No device ever holds the whole.

        Args:
            model: keeps this rank's part alone, on its device.
            infos: its parameters.
            optimizer: over the model's parameters, afterwards over this rank's masters; None: the model is frozen.
        """

    def num_micro_batches(self, wanted: int) -> int:
        """How many micro-batches this rank runs where it has so many: blank ones fill up what others need."""

    def sum_over_ranks(self, value: float) -> float:
        """The sum of each rank's number, the same on all."""

    def reduce_sums(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Reported sums over all ranks that saw different samples; empty without the LM head."""

    def broadcast_text(self, text: str | None) -> str:
        """Hand a text from sender 0 to all senders of weights; collective over them. `text`: None on the others."""

    def agree(self, action: Callable[[], None] | None) -> None:
        """Do this rank's share of something, and learn whether the others could do theirs.

        Raises: RunError on every rank if one could not.
        """

    def close(self) -> None:
        """Leave the process groups that were made here."""


def score_each(module: nn.Module, inputs: Sequence[PolicyInput]) -> list[Tensor]:
    """Run one forward after another. `module`: its forward is `policy_forward`."""
    return [module(each)[0] for each in inputs]


def accumulate_each(
    module: nn.Module, inputs: Sequence[PolicyInput], after_backward: Callable[[], None] = lambda: None
) -> dict[str, Tensor]:
    """Run forward and backward of one micro-batch after another. Returns: the sums that the loss reports."""
    sums: dict[str, Tensor] = {}
    for each in inputs:
        loss, terms = module(each)
        loss.backward()
        after_backward()
        sums = merge_sums(sums, terms)
    return sums
