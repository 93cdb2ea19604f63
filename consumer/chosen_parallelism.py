"""Choose what shards a trainer's models by its settings."""

import torch
import torch.distributed as dist

from consumer.backend_config import BackendConfig
from consumer.parallel.parallelism import Parallelism
from consumer.parallel.single_process import SingleProcess


def make_parallelism(config: BackendConfig, *, device: torch.device, timeout_s: float) -> Parallelism:
    """Arrange this rank in the settings' layout; collective over the default process group, which must exist.

    Args:
        config: whose layout has as many ranks as the group.
        device: the device that this rank computes on.
        timeout_s: time limit of a collective, in seconds.
    Raises: ConfigError, EngineError.
    """
    if config.plugin == "fsdp2":
        from consumer.parallel.fsdp import FullyShardedParallelism

        return FullyShardedParallelism(
            precision=config.precision,
            device=device,
            timeout_s=timeout_s,
            tp_size=config.tp_size,
            cp_size=config.cp_size,
            fsdp_size=config.fsdp_size,
            ep_size=config.ep_size,
        )
    from consumer.parallel.hybrid import HybridParallelism  # imports ColossalAI, which takes seconds

    return HybridParallelism(
        tp_size=config.tp_size,
        pp_size=config.pp_size,
        zero_stage=config.zero_stage,
        precision=config.precision,
        device=device,
        timeout_s=timeout_s,
        cp_size=config.cp_size,
    )


def own_parallelism(config: BackendConfig, *, device: torch.device, timeout_s: float) -> Parallelism:
    """Do the same, or without a process group arrange this process alone."""
    if not dist.is_initialized():
        return SingleProcess(device=device)
    return make_parallelism(config, device=device, timeout_s=timeout_s)
