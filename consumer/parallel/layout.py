"""Locate a trainer rank: its place among data-parallel copies, pipeline stages and tensor shards.

Ranks count through tensor shards first, then stages, then copies: rank = (dp_rank * num_stages + stage) * tp_size +
tp_rank, so that the ranks of one copy are neighbours and the coordinator can tell a rank's copy by division.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One rank's place; the default is a process on its own."""

    dp_rank: int = 0
    dp_size: int = 1
    stage: int = 0
    num_stages: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    zero_stage: int = 0  # 0 if there is one copy; 3: the copies hold their weights together (FSDP2)
    # Each with this rank and those that differ from it in one coordinate only; None where it would be alone.
    dp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None

    @property
    def is_first_stage(self) -> bool:
        """True where token ids come in."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """True where the LM head is, hence the loss and its metrics."""
        return self.stage == self.num_stages - 1

    @property
    def is_first_copy(self) -> bool:
        """True on the ranks that hold the first copy of the weights."""
        return self.dp_rank == 0 or self.zero_stage == 3

    @property
    def sender(self) -> int | None:
        """This rank's number among those that send the weights, one for each stage; None if it does not send."""
        return self.stage if self.is_stage_head else None

    @property
    def num_senders(self) -> int:
        """The number of ranks that send the weights."""
        return self.num_stages

    @property
    def is_stage_head(self) -> bool:
        """True on the one rank that speaks for its stage: sends and saves the weights."""
        return self.dp_rank == 0 and self.tp_rank == 0

    @property
    def is_reporter(self) -> bool:
        """True on the one rank that reports a step's metrics."""
        return self.is_stage_head and self.is_last_stage

    @property
    def is_partitioned(self) -> bool:
        """True if copies share out the optimizer's state (ZeRO)."""
        return self.zero_stage > 0
