"""Describe every parameter of the full model by its name, and convert between parts and full tensors.

Parameters are described before the model is sharded, from transformers' tensor-parallel plan. Weight sync, checkpoints,
optimizer state and the global gradient norm use these descriptions.

A `full` tensor has the shape in the whole model, a `shard` is this rank's part under tensor parallelism, a `slice` the
flat part of a shard that ZeRO assigns to this data-parallel rank, padded with zeros to equal lengths. Checkpoints and
engines may hold a full tensor as several: see `stored_views`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.errors import ConfigError
from coati_rl.model_files.stored_views import StoredParameter, stored_parameters
from coati_rl.ops.gradient_sketch import ShardPlace, place_of
from consumer.parallel.expert_exchange import expert_modules
from consumer.parallel.layout import Layout
from consumer.parallel.layout_rules import EXPERTS, tensor_parallel_plan
from consumer.parallel.process_group import collective


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterInfo:
    """Describe a parameter; the same on every rank."""

    name: str  # of the parameter in transformers' module
    shape: tuple[int, ...]  # of the full tensor
    stage: int  # pipeline stage that holds it
    tied_name: str | None = None  # tied embedding: its name on the last pipeline stage, which holds a copy as LM head
    split_dim: int | None = None  # dimension that tensor parallelism shards; None: replicated
    is_partial: bool = False  # replicated, but each tensor-parallel rank computes only its heads' part of the gradient
    is_expert: bool = False  # dimension 0 are experts, which expert-parallel ranks share out
    stored: StoredParameter | None = None  # what checkpoints hold of it; None: itself, under its name

    @property
    def saved(self) -> StoredParameter:
        """Return the tensors that checkpoints hold, and engines get, of the full tensor."""
        return self.stored or StoredParameter(name=self.name, shape=self.shape)


def describe_parameters(
    model: PreTrainedModel, layout: Layout, layers_per_stage: Sequence[int]
) -> tuple[ParameterInfo, ...]:
    """Return all parameters in Hugging Face order without a tied LM head; the same on every rank.

    Args:
        model: the full model, before it is sharded.
        layout: of any rank.
        layers_per_stage: decoder layers of each pipeline stage.
    Raises: ConfigError if the architecture's tensor-parallel plan is missing or has unsupported styles, its embedding
        is not a plain nn.Embedding, or a tensor of its checkpoints is not a part of one parameter.
    """
    stored = stored_parameters(model)
    base = f"{model.base_model_prefix}."
    styles = _styles(model) if layout.tp_size > 1 else {}
    stage_of_layer = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    lm_head = model.get_output_embeddings()  # None of a model with a scalar head
    lm_head_name = next((name for name, module in model.named_modules() if module is lm_head), None)
    tied = lm_head.weight if lm_head is not None and layout.num_stages > 1 else None
    experts = expert_modules(model)
    infos = []
    for name, parameter in model.named_parameters():
        inner = name.removeprefix(base)
        layer = re.match(r"layers\.(\d+)\.", inner)
        if layer:
            stage = stage_of_layer[int(layer[1])]
        else:
            stage = 0 if inner.startswith("embed_tokens.") else layout.num_stages - 1
        style = next((style for pattern, style in styles.items() if pattern.fullmatch(inner)), None)
        split_dim = {"colwise": 0, EXPERTS: 0, "rowwise": 1 if parameter.dim() > 1 else None}.get(style or "")
        infos.append(
            ParameterInfo(
                name=name,
                shape=tuple(parameter.shape),
                stage=stage,
                tied_name=f"{lm_head_name}.weight" if parameter is tied and stage == 0 else None,
                split_dim=split_dim,
                is_partial=style == "replicated_with_grad_allreduce",
                is_expert=layout.ep_size > 1 and name.rpartition(".")[0] in experts,
                stored=stored[name] if stored[name].views else None,
            )
        )
    return tuple(infos)


def _styles(model: PreTrainedModel) -> dict[re.Pattern[str], str]:
    """Return the plan by pattern of parameter names; embedding and LM head are sharded along the vocabulary."""
    plan = {**tensor_parallel_plan(model.config), "embed_tokens": "colwise", "lm_head": "colwise"}
    embedding = type(model.get_input_embeddings())
    if embedding is not nn.Embedding:  # ColossalAI's replacement would drop, for example, a scale
        raise ConfigError(
            f"tensor parallelism: {type(model).__name__} embeds its tokens by {embedding.__name__}, which is not "
            "supported; use -tp 1"
        )
    return {re.compile(re.escape(pattern).replace(r"\*", r"\d+") + r"\.\w+"): style for pattern, style in plan.items()}


class LocalParameters:
    """Hold this rank's parameters by Hugging Face name; gather full tensors and cut out this rank's parts.

    Methods that gather are collective over the ranks of a pipeline stage, in the same order of names.
    """

    def __init__(self, model: nn.Module, infos: Sequence[ParameterInfo], layout: Layout) -> None:
        """Take this rank's model after sharding, without the parameters of other pipeline stages."""
        self._layout = layout
        held = dict(model.named_parameters())
        names = {info: info.name if info.name in held else info.tied_name or "" for info in infos}
        self.infos = {info.name: info for info, name in names.items() if name in held}
        self.by_name: dict[str, nn.Parameter] = {info.name: held[names[info]] for info in self.infos.values()}
        self.trained = {name: parameter for name, parameter in self.by_name.items() if parameter.requires_grad}

    @property
    def local(self) -> Mapping[str, Tensor]:
        """Return this rank's parts themselves by name."""
        return self.by_name

    def counts_in_norm(self, name: str) -> bool:
        """Return True on exactly one of the ranks that hold the same elements of a gradient."""
        info, layout = self.infos[name], self._layout
        is_first_shard = info.split_dim is not None or layout.tp_rank == 0
        is_first_dp_rank = layout.is_partitioned or layout.dp_rank == 0
        return is_first_shard and is_first_dp_rank and info.stage == layout.stage

    def place(self, name: str) -> ShardPlace:
        """Return where this rank's part of a gradient is in the full one."""
        layout, shape, dim = self._layout, tuple(self.by_name[name].shape), self.infos[name].split_dim
        is_cut = layout.tp_group is not None and dim is not None
        length = -(-self.by_name[name].numel() // layout.dp_size)
        return place_of(
            shape,
            start=layout.dp_rank * length if layout.is_partitioned else 0,
            split_dim=dim if is_cut else None,
            offset=layout.tp_rank * shape[dim] if is_cut and dim is not None else 0,
        )

    def full_weight(self, name: str) -> Tensor:
        """Return the full weight; collective over the tensor-parallel ranks."""
        return self.full(name, self.by_name[name].detach())

    def weight_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full weight."""
        return self.shard(name, full)

    def full_state(self, name: str, part: Tensor) -> Tensor:
        """Gather the full tensor from the part that each rank's optimizer holds; collective over a pipeline stage."""
        return self.full(name, self.shard_of_slices(name, part))

    def state_part(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's part of a full tensor, the inverse of `full_state`."""
        return self.slice_of_shard(self.shard(name, full))

    def full(self, name: str, shard: Tensor) -> Tensor:
        """Gather the full tensor from the shards of all tensor-parallel ranks; collective over them."""
        return full_of_shards(self.infos[name], shard, self._layout)

    def shard(self, name: str, full: Tensor) -> Tensor:
        """Return this rank's shard, the inverse of `full`."""
        return shard_of(self.infos[name], full, self._layout)

    def shard_of_slices(self, name: str, flat: Tensor) -> Tensor:
        """Gather the shard from the slices of all data-parallel ranks; collective over them."""
        layout, parameter = self._layout, self.by_name[name]
        if not layout.is_partitioned:
            return flat
        joined = flat.new_empty(flat.numel() * layout.dp_size)
        with collective(f"gather {name}"):
            dist.all_gather_into_tensor(joined, flat.contiguous(), group=layout.dp_group)
        return joined[: parameter.numel()].view(parameter.shape)

    def slice_of_shard(self, shard: Tensor) -> Tensor:
        """Return this data-parallel rank's slice of a shard, as ColossalAI partitions its master weights."""
        if not self._layout.is_partitioned:
            return shard
        return padded_rows(shard, self._layout.dp_size)[self._layout.dp_rank]


class Cut(NamedTuple):
    """Say how a tensor is cut into shards, before FSDP2 or ZeRO share out each of them."""

    dim: int | None  # None: it is whole
    rank: int
    size: int
    group: dist.ProcessGroup | None  # None: this rank is alone


def cut_of(info: ParameterInfo, layout: Layout) -> Cut:
    """Return how a parameter is cut: experts over expert-parallel ranks, others over tensor-parallel ones."""
    if info.is_expert:
        return Cut(0, layout.ep_rank, layout.ep_size, layout.ep_group)
    return Cut(info.split_dim, layout.tp_rank, layout.tp_size, layout.tp_group)


def full_of_shards(info: ParameterInfo, shard: Tensor, layout: Layout) -> Tensor:
    """Gather a full tensor from the shards of all tensor- or expert-parallel ranks; collective over them."""
    cut = cut_of(info, layout)
    if cut.group is None or cut.dim is None:
        return shard
    parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(cut.size)]
    with collective(f"gather {info.name}"):
        dist.all_gather(parts, shard.contiguous(), group=cut.group)
    return torch.cat(parts, dim=cut.dim)


def shard_of(info: ParameterInfo, full: Tensor, layout: Layout) -> Tensor:
    """Return this rank's shard of a full tensor, the inverse of `full_of_shards`."""
    cut = cut_of(info, layout)
    return full if cut.group is None or cut.dim is None else full.chunk(cut.size, dim=cut.dim)[cut.rank]


def padded_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """Return the tensor's elements in order as [num_rows, n], with zeros after the last."""
    flat = tensor.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % num_rows)).view(num_rows, -1)
