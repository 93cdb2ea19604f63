"""Define the layout of a trainer rank: its data-, context-, pipeline- and tensor-parallel coordinates.

rank = (dp_rank * num_stages + stage) * tp_size + tp_rank. `stage` is the pipeline stage. `dp_rank` numbers the copies
of the weights, over which gradients are summed: dp_rank = data_rank * cp_size + cp_rank. Ranks with the same data_rank
get the same samples, and are consecutive, so that the coordinator can compute data_rank by division; each of the
context-parallel ranks among them computes its own tokens of every row. With FSDP2 `fsdp_size` consecutive dp_ranks
hold the rows of one copy of the weights together: dp_rank = copy * fsdp_size + fsdp_rank; `ep_size` consecutive ones
among them share the experts of a layer out: ep_rank = fsdp_rank % ep_size.
"""

from dataclasses import dataclass

import torch.distributed as dist

from consumer.models.context_part import ContextRank


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Hold the coordinates and process groups of one rank; the default is a single process."""

    dp_rank: int = 0
    dp_size: int = 1  # copies of the weights
    cp_rank: int = 0
    cp_size: int = 1
    stage: int = 0
    num_stages: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    zero_stage: int = 0  # 0 if dp_size is 1; 3: weights are sharded over data-parallel ranks (FSDP2)
    fsdp_size: int = 1  # data-parallel ranks that share one copy of the weights; dp_size if there is one copy
    ep_size: int = 1
    # Each joins the ranks that differ in one coordinate only; None if this rank would be its only member.
    dp_group: dist.ProcessGroup | None = None
    pp_group: dist.ProcessGroup | None = None
    tp_group: dist.ProcessGroup | None = None
    cp_group: dist.ProcessGroup | None = None
    data_group: dist.ProcessGroup | None = None  # joins ranks that differ in data_rank only; without cp the dp_group
    fsdp_group: dist.ProcessGroup | None = None  # joins the ranks that share a copy of the weights
    ep_group: dist.ProcessGroup | None = None  # joins the ranks that hold all experts together
    expert_group: dist.ProcessGroup | None = None  # joins the ranks that share the rows of the same experts
    copy_group: dist.ProcessGroup | None = None  # joins the ranks that hold the same rows; None: there is one copy

    @property
    def data_rank(self) -> int:
        """Return the number of this rank's part of the samples."""
        return self.dp_rank // self.cp_size

    @property
    def num_data_ranks(self) -> int:
        """Return how many parts the samples are shared out in."""
        return self.dp_size // self.cp_size

    @property
    def fsdp_rank(self) -> int:
        """Return the number of this rank's rows."""
        return self.dp_rank % self.fsdp_size

    @property
    def ep_rank(self) -> int:
        """Return the number of this rank's experts."""
        return self.fsdp_rank % self.ep_size

    @property
    def context(self) -> ContextRank | None:
        """Return this rank's place among those that share each row; None if rows are whole."""
        if self.cp_group is None:
            return None
        return ContextRank(rank=self.cp_rank, size=self.cp_size, group=self.cp_group)

    @property
    def is_last_stage(self) -> bool:
        """Return True on the pipeline stage that has the LM head, and thus the loss and its metrics."""
        return self.stage == self.num_stages - 1

    @property
    def is_first_copy(self) -> bool:
        """Return True on ranks that export weights: those with dp_rank 0, or with FSDP2 all that share its copy."""
        return self.dp_rank < self.fsdp_size

    @property
    def has_first_samples(self) -> bool:
        """Return True on ranks that compute together with the first ranks: of data_rank 0, or all of FSDP2."""
        return self.data_rank == 0 or self.zero_stage == 3

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
