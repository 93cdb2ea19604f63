"""Make the process groups of context parallelism: of ranks that share rows, and of ranks with other samples."""

import dataclasses
from collections.abc import Iterable, Iterator

import torch.distributed as dist

from consumer.parallel.layout import Layout


def with_context_groups(layout: Layout, cp_size: int) -> Layout:
    """Return the layout with each of its data-parallel ranks' samples shared by `cp_size` copies of the weights.

    Collective over the default group.

    Args:
        layout: of this rank, without context parallelism.
        cp_size: context-parallel ranks; must divide `layout.dp_size`.
    """
    if layout.dp_size % cp_size:
        raise ValueError(f"{layout.dp_size} copies of the weights are no multiple of {cp_size} context-parallel ranks")
    if cp_size == 1:
        return dataclasses.replace(layout, data_group=layout.dp_group)
    return dataclasses.replace(
        layout,
        cp_rank=layout.dp_rank % cp_size,
        cp_size=cp_size,
        cp_group=group_of_rank(_context_ranks(layout, cp_size)),
        data_group=group_of_rank(_data_ranks(layout, cp_size)),
    )


def group_of_rank(sets: Iterable[list[int]]) -> dist.ProcessGroup | None:
    """Make a process group of each set of ranks; collective over the default group.

    Args:
        sets: the same on all ranks, in the same order; each rank is in one of them.
    Returns: that of this rank; None if it would be the only member.
    """
    own: dist.ProcessGroup | None = None
    for ranks in sets:
        made = dist.new_group(ranks) if len(ranks) > 1 else None
        own = made if dist.get_rank() in ranks else own
    return own


def destroy_context_groups(layout: Layout) -> None:
    """Destroy this rank's groups of `with_context_groups`."""
    for group in (layout.cp_group, layout.data_group):
        if layout.cp_size > 1 and group is not None:
            dist.destroy_process_group(group)


def _context_ranks(layout: Layout, cp_size: int) -> Iterator[list[int]]:
    """Yield the ranks of each context-parallel group."""
    width = layout.num_stages * layout.tp_size  # ranks of one copy of the weights
    for first in range(0, layout.dp_size, cp_size):
        for place in range(width):
            yield [(first + cp_rank) * width + place for cp_rank in range(cp_size)]


def _data_ranks(layout: Layout, cp_size: int) -> Iterator[list[int]]:
    """Yield the ranks that have the same tokens of rows of other samples."""
    width = layout.num_stages * layout.tp_size
    for cp_rank in range(cp_size):
        for place in range(width):
            yield [copy * width + place for copy in range(cp_rank, layout.dp_size, cp_size)]
