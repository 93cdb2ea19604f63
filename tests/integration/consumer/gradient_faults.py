"""Define faults of a trainer that the gradient tests must detect, and the loss that shows each."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from coati_rl.algorithms import loss
from consumer import role_models as models
from consumer.parallel import gradient_reduction
from consumer.parallel.parameters import ParameterInfo


def wrong_denominator() -> None:
    """The average over data-parallel copies that DDP would form."""
    right = gradient_reduction.sum_in_place

    def averaging(gradients: list[Tensor], group: dist.ProcessGroup) -> None:
        right(gradients, group)
        for gradient in gradients:
            gradient /= dist.get_world_size(group)

    gradient_reduction.sum_in_place = averaging


def dropped_q_norm_sum() -> None:
    """Treat replicated_with_grad_allreduce of transformers' plan as replicated only."""
    described = models.describe_parameters

    def forgetful(*arguments: Any) -> tuple[ParameterInfo, ...]:
        return tuple(dataclasses.replace(info, is_partial=False) for info in described(*arguments))

    models.describe_parameters = forgetful


def undivided_pipeline() -> None:
    """The scheduler's division by the number of micro-batches stays."""
    # It brings ColossalAI: seconds, which collecting tests can do without.
    from consumer.parallel.hybrid import HybridModel

    right = HybridModel._run_pipeline

    def divided(model: HybridModel, inputs: Sequence[Any], criterion: Any) -> None:
        def without_factor(output: Any, batch: Any) -> Tensor:
            return criterion(output, batch) / len(inputs)

        right(model, inputs, without_factor)

    HybridModel._run_pipeline = divided


def ratio_of_a_row() -> None:
    """A packed row is taken for one sample."""
    right = loss.sample_mean

    def of_row(values: Tensor, loss_mask: Tensor, sample_index: Tensor) -> Tensor:
        return right(values, loss_mask, sample_index.clamp(max=0))

    loss.sample_mean = of_row


FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    wrong_denominator.__name__: (wrong_denominator, "clip"),
    dropped_q_norm_sum.__name__: (dropped_q_norm_sum, "clip"),
    undivided_pipeline.__name__: (undivided_pipeline, "clip"),
    ratio_of_a_row.__name__: (ratio_of_a_row, "sequence"),
}
