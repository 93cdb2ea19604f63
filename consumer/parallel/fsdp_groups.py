"""Arrange ranks for FSDP2: tensor-parallel ranks, and data-parallel ranks that share a copy of the weights or hold it.

rank = dp_rank * tp_size + tp_rank, dp_rank = copy * fsdp_size + fsdp_rank: tensor-parallel ranks, which talk most, are
neighbours, and the ranks of one copy before those of the next.
"""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from consumer.parallel.context_groups import destroy_context_groups, group_of_rank, with_context_groups
from consumer.parallel.layout import Layout


def fsdp_layout(*, tp_size: int, cp_size: int, fsdp_size: int) -> tuple[Layout, dist.ProcessGroup]:
    """Return this rank's layout, and the group over which its models are sharded, which may be of one rank.

    Collective over the default group.

    Args:
        tp_size: tensor-parallel ranks.
        cp_size: context-parallel ranks.
        fsdp_size: data-parallel ranks that share a copy of the weights; 0: all of them.
    Raises: ValueError if the sizes do not divide the number of ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dp_size = size // tp_size
    fsdp_size = fsdp_size or dp_size
    if dp_size * tp_size != size or dp_size % fsdp_size:
        raise ValueError(f"{size} ranks cannot be {tp_size} tensor-parallel ones of copies on {fsdp_size} each")
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
        dp_group=dp_group,
        tp_group=tp_group,
        fsdp_group=fsdp_group,
        copy_group=group_of_rank(_copy_ranks(size, tp_size, fsdp_size)) if fsdp_size < dp_size else None,
    )
    layout = with_context_groups(layout, cp_size)
    return layout, layout.fsdp_group or _alone(size)


def destroy_fsdp_groups(layout: Layout, shards: dist.ProcessGroup) -> None:
    """Destroy this rank's groups of `fsdp_layout`; the default group stays."""
    destroy_context_groups(layout)
    own = {layout.tp_group, layout.dp_group, layout.copy_group, shards} - {None, dist.group.WORLD}
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
