"""Define the layout of a trainer rank: its data-parallel, pipeline-parallel and tensor-parallel coordinates.

rank = (dp_rank * num_stages + stage) * tp_size + tp_rank, so that ranks with the same dp_rank are consecutive and the
coordinator can compute dp_rank by division. `stage` is the pipeline stage.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Hold the coordinates and process groups of one rank; the default is a single process."""

    dp_rank: int = 0
    dp_size: int = 1
    stage: int = 0
    num_stages: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    zero_stage: int = 0  # 0 if dp_size is 1; 3: weights are sharded over data-parallel ranks (FSDP2)
    # Each joins the ranks that differ in one coordinate only; None if this rank would be its only member.
    dp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None

    @property
    def is_first_stage(self) -> bool:
        """Return True on the pipeline stage that gets token ids."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Return True on the pipeline stage that has the LM head, and thus the loss and its metrics."""
        return self.stage == self.num_stages - 1

    @property
    def is_first_copy(self) -> bool:
        """Return True on ranks that export weights: those with dp_rank 0, or all if weights are sharded (FSDP2)."""
        return self.dp_rank == 0 or self.zero_stage == 3

    @property
    def sender(self) -> int | None:
        """Return this rank's number among the senders of weights, one per pipeline stage; None if it is not one."""
        return self.stage if self.is_stage_head else None

    @property
    def num_senders(self) -> int:
        """Return the number of ranks that send weights."""
        return self.num_stages

    @property
    def is_stage_head(self) -> bool:
        """Return True on the one rank of each pipeline stage that sends and saves its weights."""
        return self.dp_rank == 0 and self.tp_rank == 0

    @property
    def is_reporter(self) -> bool:
        """Return True on the one rank that reports a step's metrics."""
        return self.is_stage_head and self.is_last_stage

    @property
    def is_partitioned(self) -> bool:
        """Return True if the optimizer's state is partitioned over data-parallel ranks (ZeRO)."""
        return self.zero_stage > 0
