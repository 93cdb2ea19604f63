"""Set what follows from the size of weights: how long an update or a checkpoint may take, and engines' memory."""

import math

from coati_rl.config.config import Config

# What a transfer or a disk has at the least: gloo over one 10 Gb/s link, and a digest of memory that is read for the
# first time; a directory that all nodes share.
SLOW_BYTES_PER_S = 500_000_000
CONTEXT_BYTES = 2**30  # CUDA's context and NCCL's buffers, which vLLM's share of a GPU does not count
MOST_SHARE = 0.9  # of a GPU for vLLM, whose own default is 0.92 without a process that sends it weights
SPARE_SHARE = 0.02  # that is left besides, for what allocators cannot use again


def with_sync_timeout(config: Config, update_bytes: int) -> Config:
    """Add the time that an update of this size takes where it is slow to --sync-timeout-s, unless it was given."""
    if "sync_timeout_s" in config.sync.model_fields_set:
        return config
    return config.with_changes(sync_timeout_s=config.sync.sync_timeout_s + slow_seconds(update_bytes))


def slow_seconds(num_bytes: int) -> int:
    """Return the seconds that so many bytes take where it is slow."""
    return num_bytes // SLOW_BYTES_PER_S


def stages_on_gpu(update_bytes: int, *, gpu_bytes: int | None, gpu_memory_utilization: float) -> bool:
    """Whether each rank of an engine stages updates that arrive over NCCL whole on its GPU, beside vLLM's share.

    Otherwise the first rank stages them in host memory, for all ranks of the engine. On the GPU a commit is shorter.

    Args:
        update_bytes: of all weights in the wire's precision.
        gpu_bytes: of a GPU of the run; None: unknown.
        gpu_memory_utilization: the share that vLLM takes.
    """
    return gpu_bytes is not None and gpu_memory_utilization * gpu_bytes + update_bytes + CONTEXT_BYTES <= gpu_bytes


def engine_share(*, gpu_bytes: int, wanted_bytes: int, update_bytes: int | None, commit_bytes: int) -> float:
    """Return the share of a GPU for vLLM in hundredths: all but what updates need beside it, at most 0.9.

    An update is staged whole on the GPU where vLLM then still has all that it can use, since the commit is shorter.

    Args:
        gpu_bytes: of the GPU.
        wanted_bytes: of a rank's weights, and of keys and values of all samples in flight at their longest.
        update_bytes: of all weights; None: the transport stages none on GPUs.
        commit_bytes: what a rank needs to load an update that is staged elsewhere.
    """

    def share_beside(size: int) -> float:
        left = math.floor(100 * (gpu_bytes - size - CONTEXT_BYTES) / gpu_bytes - 100 * SPARE_SHARE) / 100
        return min(MOST_SHARE, max(0.01, left))

    if update_bytes is not None:
        share = share_beside(update_bytes)
        if share * gpu_bytes >= wanted_bytes:
            return share
    return share_beside(commit_bytes)
