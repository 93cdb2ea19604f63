"""Arrange ranks for FSDP2: tensor-parallel ranks, and data-parallel ranks that share a copy of the weights or hold it.

rank = dp_rank * tp_size + tp_rank, dp_rank = copy * fsdp_size + fsdp_rank: tensor-parallel ranks, which talk most, are
neighbours, and the ranks of one copy before those of the next.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch.distributed as dist

from consumer.parallel.context_groups import destroy_context_groups, group_of_rank, with_context_groups
from consumer.parallel.layout import Layout


class ShardGroups(NamedTuple):
    """Hold the groups over which FSDP2 shards; a group may be of one rank."""

    weights: dist.ProcessGroup
    experts: dist.ProcessGroup  # of the same experts; without expert parallelism as other weights


def fsdp_layout(*, tp_size: int, cp_size: int, fsdp_size: int, ep_size: int) -> tuple[Layout, ShardGroups]:
    """Return this rank's layout, and the groups over which its models are sharded.

    Collective over the default group.

    Args:
        tp_size: tensor-parallel ranks.
        cp_size: context-parallel ranks.
        fsdp_size: data-parallel ranks that share a copy of the weights; 0: all of them.
        ep_size: of these, ranks that share the experts of a layer out.
    Raises: ValueError if the sizes do not divide the number of ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dp_size = size // tp_size
    fsdp_size = fsdp_size or dp_size
    if dp_size * tp_size != size or dp_size % fsdp_size or fsdp_size % ep_size:
        raise ValueError(f"{size} ranks: tp {tp_size}, {fsdp_size} for each copy, ep {ep_size} do not divide them")
    world: Any = dist.group.WORLD
    tp_group = group_of_rank(_tensor_ranks(size, tp_size))
    dp_group = world if tp_size == 1 and size > 1 else group_of_rank(_data_ranks(size, tp_size))
    fsdp_group = dp_group if fsdp_size == dp_size else group_of_rank(_shard_ranks(size, tp_size, fsdp_size))
    layout = Layout(
        dp_rank=rank // tp_size,
        dp_size=dp_size,
        tp_rank=rank % tp_size,
        tp_size=tp_size,
        zero_stage=3,
        fsdp_size=fsdp_size,
        ep_size=ep_size,
        dp_group=dp_group,
        tp_group=tp_group,
        fsdp_group=fsdp_group,
        copy_group=group_of_rank(_copy_ranks(size, tp_size, fsdp_size)) if fsdp_size < dp_size else None,
    )
    if ep_size > 1:  # tensor-parallel ranks have none
        sets = [[*range(first, first + fsdp_size)] for first in range(0, size, fsdp_size)]
        layout = replace(
            layout,
            ep_group=group_of_rank(ranks[i : i + ep_size] for ranks in sets for i in range(0, fsdp_size, ep_size)),
            expert_group=group_of_rank(ranks[ep_rank::ep_size] for ranks in sets for ep_rank in range(ep_size)),
        )
    layout, weights = with_context_groups(layout, cp_size), layout.fsdp_group or _alone(size)
    experts = weights if ep_size == 1 else layout.expert_group or _alone(size)
    return layout, ShardGroups(weights=weights, experts=experts)


def destroy_fsdp_groups(layout: Layout, shards: ShardGroups) -> None:
    """Destroy this rank's groups of `fsdp_layout`; the default group stays."""
    destroy_context_groups(layout)
    own = {layout.tp_group, layout.dp_group, layout.ep_group, layout.copy_group, *shards} - {None, dist.group.WORLD}
    for group in own:
        dist.destroy_process_group(group)


def _alone(size: int) -> Any:
    """Return a group of this rank alone; FSDP2 needs one."""
    groups = [dist.new_group([rank]) for rank in range(size)] if size > 1 else [dist.group.WORLD]
    return groups[dist.get_rank()]


def _tensor_ranks(size: int, tp_size: int) -> Iterator[list[int]]:
    for first in range(0, size, tp_size):
        yield [*range(first, first + tp_size)]


def _data_ranks(size: int, tp_size: int) -> Iterator[list[int]]:
    for tp_rank in range(tp_size):
        yield [*range(tp_rank, size, tp_size)]


def _shard_ranks(size: int, tp_size: int, fsdp_size: int) -> Iterator[list[int]]:
    """Yield the ranks that share a copy of the weights, of one tensor-parallel rank each."""
    for ranks in _data_ranks(size, tp_size):
        for first in range(0, len(ranks), fsdp_size):
            yield ranks[first : first + fsdp_size]


def _copy_ranks(size: int, tp_size: int, fsdp_size: int) -> Iterator[list[int]]:
    """Yield the ranks that hold the same rows of each copy."""
    for ranks in _data_ranks(size, tp_size):
        for fsdp_rank in range(fsdp_size):
            yield ranks[fsdp_rank::fsdp_size]
