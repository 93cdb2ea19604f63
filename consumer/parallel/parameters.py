"""Every parameter of the whole model by its Hugging Face name, and which part of it a rank holds.

Described before the model is sharded, from transformers' own tensor-parallel plan; used by everything that turns parts
into wholes or back: weight sync, checkpoints, the optimizer's state, the global norm.

`full` is a tensor of the whole model's shape, `shard` this rank's part under tensor parallelism, `slice` the flat part
of a shard that ZeRO leaves to this data-parallel copy, padded with zeros to equal lengths.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from coati_rl.errors import ConfigError
from consumer.parallel.layout import Layout
from consumer.parallel.layout_rules import tensor_parallel_plan
from consumer.parallel.process_group import collective


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterInfo:
    """Describe what is true of a parameter on every rank."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]  # of the whole
    stage: int  # pipeline stage that holds it
    tied_name: str | None = None  # its name on the last stage, which holds a copy: embedding and LM head are one
    split_dim: int | None = None  # dimension along which tensor parallelism cuts it; None: every shard is a whole
    is_partial: bool = False  # whole on every tensor rank, but each computes only its heads' share of the gradient


def describe_parameters(
    model: PreTrainedModel, layout: Layout, layers_per_stage: Sequence[int]
) -> tuple[ParameterInfo, ...]:
    """All parameters in Hugging Face order, a tied LM head left out; the same on every rank.

    Args:
        model: the whole model, before anything is sharded.
        layout: any rank's.
        layers_per_stage: decoder layers of each pipeline stage.
    Raises: ConfigError if the architecture's tensor-parallel plan is missing or has styles that are not handled, or its
        embedding is no plain one.
    """
    base = f"{model.base_model_prefix}."
    styles = _styles(model) if layout.tp_size > 1 else {}
    stage_of_layer = [stage for stage, count in enumerate(layers_per_stage) for _ in range(count)]
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    tied = model.get_output_embeddings().weight if layout.num_stages > 1 else None
    infos = []
    for name, parameter in model.named_parameters():
        inner = name.removeprefix(base)
        layer = re.match(r"layers\.(\d+)\.", inner)
        if layer:
            stage = stage_of_layer[int(layer[1])]
        else:
            stage = 0 if inner.startswith("embed_tokens.") else layout.num_stages - 1
        style = next((style for pattern, style in styles.items() if pattern.fullmatch(inner)), None)
        split_dim = {"colwise": 0, "rowwise": 1 if parameter.dim() > 1 else None}.get(style or "")
        infos.append(
            ParameterInfo(
                name=name,
                shape=tuple(parameter.shape),
                stage=stage,
                tied_name=f"{head}.weight" if parameter is tied and stage == 0 else None,
                split_dim=split_dim,
                is_partial=style == "replicated_with_grad_allreduce",
            )
        )
    return tuple(infos)


def _styles(model: PreTrainedModel) -> dict[re.Pattern[str], str]:
    """The plan's patterns of modules, as patterns of their parameters; both ends of the vocabulary are cut along it."""
    plan = {**tensor_parallel_plan(model.config), "embed_tokens": "colwise", "lm_head": "colwise"}
    embedding = type(model.get_input_embeddings())
    if embedding is not nn.Embedding:  # the one that replaces it knows nothing of a scale, say
        raise ConfigError(
            f"tensor parallelism: {type(model).__name__} embeds its tokens by {embedding.__name__}, which is not "
            "handled; use -tp 1"
        )
    return {re.compile(re.escape(pattern).replace(r"\*", r"\d+") + r"\.\w+"): style for pattern, style in plan.items()}


class LocalParameters:
    """This rank's parameters by Hugging Face name, and how their parts are put together and cut out.

    What joins parts is collective over the ranks that hold them: all ranks of a stage, in the same order of names.
    """

    def __init__(self, model: nn.Module, infos: Sequence[ParameterInfo], layout: Layout) -> None:
        """`model`: this rank's, after sharding. Parameters of other stages are gone from it."""
        self._layout = layout
        held = dict(model.named_parameters())
        names = {info: info.name if info.name in held else info.tied_name or "" for info in infos}
        self.infos = {info.name: info for info, name in names.items() if name in held}
        self.by_name: dict[str, nn.Parameter] = {info.name: held[names[info]] for info in self.infos.values()}

    @property
    def local(self) -> Mapping[str, Tensor]:
        """This rank's parts themselves."""
        return self.by_name

    def counts_in_norm(self, name: str) -> bool:
        """True on exactly one of the ranks that hold the same numbers of a gradient."""
        info, layout = self.infos[name], self._layout
        is_first_shard = info.split_dim is not None or layout.tp_rank == 0
        is_first_copy = layout.is_partitioned or layout.dp_rank == 0
        return is_first_shard and is_first_copy and info.stage == layout.stage

    def full_weight(self, name: str) -> Tensor:
        """The whole weight; collective over the tensor ranks."""
        return self.full(name, self.by_name[name].detach())

    def full_state(self, name: str, part: Tensor) -> Tensor:
        """The whole tensor from what each rank's optimizer holds of it; collective over a stage."""
        return self.full(name, self.shard_of_slices(name, part))

    def state_part(self, name: str, full: Tensor) -> Tensor:
        """The inverse of `full_state`: what this rank's optimizer holds."""
        return self.slice_of_shard(self.shard(name, full))

    def full(self, name: str, shard: Tensor) -> Tensor:
        """The whole tensor from the shards of all tensor ranks; collective over them."""
        dim, group = self.infos[name].split_dim, self._layout.tp_group
        if group is None or dim is None:
            return shard
        parts = [torch.empty_like(shard, memory_format=torch.contiguous_format) for _ in range(self._layout.tp_size)]
        with collective(f"gather {name}"):
            dist.all_gather(parts, shard.contiguous(), group=group)
        return torch.cat(parts, dim=dim)

    def shard(self, name: str, full: Tensor) -> Tensor:
        """The inverse of `full`: this rank's part."""
        dim = self.infos[name].split_dim
        if self._layout.tp_group is None or dim is None:
            return full
        return full.chunk(self._layout.tp_size, dim=dim)[self._layout.tp_rank]

    def shard_of_slices(self, name: str, flat: Tensor) -> Tensor:
        """The shard from the slices of all data-parallel copies; collective over them."""
        layout, parameter = self._layout, self.by_name[name]
        if not layout.is_partitioned:
            return flat
        joined = flat.new_empty(flat.numel() * layout.dp_size)
        with collective(f"gather {name}"):
            dist.all_gather_into_tensor(joined, flat.contiguous(), group=layout.dp_group)
        return joined[: parameter.numel()].view(parameter.shape)

    def slice_of_shard(self, shard: Tensor) -> Tensor:
        """The inverse: this copy's slice of a shard, as ColossalAI cuts its master weights."""
        if not self._layout.is_partitioned:
            return shard
        return padded_rows(shard, self._layout.dp_size)[self._layout.dp_rank]


def padded_rows(tensor: Tensor, num_rows: int) -> Tensor:
    """[num_rows, n]: the tensor's elements in order, with zeros after the last."""
    flat = tensor.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % num_rows)).view(num_rows, -1)
