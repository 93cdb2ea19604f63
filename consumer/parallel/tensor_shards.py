"""Cut a model over tensor-parallel ranks in place, without ColossalAI: each keeps its shards of transformers' modules.

A linear layer that is cut by columns of its output has a part of its input's gradient on each rank, one that is cut by
rows of its input a part of its output; both are summed (`rank_sums`). Embedding and LM head are cut along the
vocabulary: the embedding of a token comes from the rank that has it, the head's shards are the loss's. Which layers are
cut is transformers' plan (`layout_rules`).
"""

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from consumer.models.scalar_head import scalar_head
from consumer.parallel.experts import ExpertsOfRank
from consumer.parallel.layout_rules import EXPERTS, tensor_parallel_plan
from consumer.parallel.rank_sums import sum_backward, sum_forward


def cut_tensors(model: PreTrainedModel, group: dist.ProcessGroup) -> None:
    """Keep this rank's shards of a whole model. Its parameters stay the same objects, with views of their data.

    Raises: ConfigError if the architecture's plan is not handled.
    """
    base: Any = model.base_model
    for pattern, style in tensor_parallel_plan(model.config).items():
        cut, path = CUTS.get(style), pattern.removeprefix("layers.*.")
        if cut is not None:
            for layer in base.layers:
                modules = dict(layer.named_modules())
                if path in modules:  # of a mixture of experts some layers may be dense
                    cut(modules[path], group)
    embedding = model.get_input_embeddings()
    head = None if scalar_head(model) is not None else model.get_output_embeddings()
    _cut_embedding(embedding, group)
    if head is not None:
        tied = head.weight is embedding.weight
        _keep(head, {"bias": 0} if tied else {"weight": 0, "bias": 0}, group)


def _cut_columns(linear: Any, group: dist.ProcessGroup) -> None:
    """Keep rows of the weight: this rank computes some of the outputs."""
    _keep(linear, {"weight": 0, "bias": 0}, group)

    def forward(module: Any, inputs: Tensor) -> Tensor:
        return F.linear(sum_backward(inputs, group), module.weight, module.bias)

    linear.forward = MethodType(forward, linear)


def _cut_rows(linear: Any, group: dist.ProcessGroup) -> None:
    """Keep columns of the weight: this rank has some of the inputs. The bias is added once, and has its gradient."""
    _keep(linear, {"weight": 1}, group)

    def forward(module: Any, inputs: Tensor) -> Tensor:
        total = sum_forward(F.linear(inputs, module.weight), group)
        return total if module.bias is None else total + module.bias

    linear.forward = MethodType(forward, linear)


def _cut_embedding(embedding: Any, group: dist.ProcessGroup) -> None:
    """Keep some tokens' rows; others are zero here, and come from the ranks that have them."""
    _keep(embedding, {"weight": 0}, group)
    number, first = len(embedding.weight), dist.get_rank(group) * len(embedding.weight)
    blank = None if embedding.padding_idx is None else embedding.padding_idx - first
    padding_idx = blank if blank is not None and 0 <= blank < number else None

    def forward(module: Any, token_ids: Tensor) -> Tensor:
        own = token_ids - first
        is_other = (own < 0) | (own >= number)
        found = F.embedding(own.masked_fill(is_other, 0), module.weight, padding_idx)
        return sum_forward(found.masked_fill(is_other[..., None], 0.0), group)

    embedding.forward = MethodType(forward, embedding)


def _share_experts(experts: nn.Module, group: dist.ProcessGroup) -> None:
    ExpertsOfRank.from_native_module(experts, group)


def _keep(module: nn.Module, dims: Mapping[str, int], group: dist.ProcessGroup) -> None:
    """Keep this rank's chunk of parameters along a dimension each; views, so that a file's pages are not read."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    for name, dim in dims.items():
        parameter = getattr(module, name)
        if parameter is not None:
            parameter.data = parameter.data.chunk(size, dim=dim)[rank]


CUTS: Mapping[str, Callable[[Any, dist.ProcessGroup], None]] = {
    "colwise": _cut_columns,
    "rowwise": _cut_rows,
    EXPERTS: _share_experts,
}
