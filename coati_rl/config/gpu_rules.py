"""Set what a run takes of a device unless told otherwise, and check what cannot fit on GPUs."""

import math

from coati_rl.config.config import Config
from coati_rl.errors import ConfigError
from coati_rl.types import Device

TOKEN_BUDGET = 16384  # of a micro-batch: fewer tokens leave matrix products, and the traffic of gradients, inefficient
_GIB = 2**30
_CONTEXT_BYTES = _GIB  # CUDA's context and NCCL's buffers, which vLLM's share does not count


def with_device_defaults(config: Config, device: Device) -> Config:
    """Set what depends on the device and is not given.

    On GPUs micro-batches are bounded by tokens, with gradient checkpointing, where the user has set neither bound.
    """
    said = config.parallel.model_fields_set
    if device == "cpu" or {"train_microbatch_size", "max_tokens_per_microbatch"} & said:
        return config
    defaults = {
        "train_microbatch_size": config.parallel.train_minibatch_size * config.sampling.num_generations,
        "max_tokens_per_microbatch": max(TOKEN_BUDGET, config.max_model_len),
        "gradient_checkpointing": True,
    }
    return config.with_changes(**{name: value for name, value in defaults.items() if name not in said})


def check_staging(config: Config, *, update_bytes: int, gpu_bytes: int | None) -> list[str]:
    """A whole update has to fit beside the engine's share, as it is staged while the engine generates.

    Args:
        config: of a run whose weights travel from GPU to GPU.
        update_bytes: of all weights in the wire's precision; every rank of an engine stages all of them.
        gpu_bytes: memory of an engine's GPU; None if no such GPU is on this machine.
    Returns: warnings. Raises: ConfigError if the update cannot fit.
    """
    share = config.parallel.gpu_memory_utilization
    need = update_bytes + _CONTEXT_BYTES
    if gpu_bytes is None:
        smallest = math.ceil(need / (1 - share) / _GIB)
        return [
            f"--gpu-memory-utilization {share:g} and a new version of the weights beside it ({need / _GIB:.1f} GiB) "
            f"need GPUs of {smallest} GiB or more"
        ]
    if share * gpu_bytes + need <= gpu_bytes:
        return []
    largest = int(100 * (gpu_bytes - need) / gpu_bytes) / 100  # rounded down
    remedy = f"--gpu-memory-utilization {largest:g} or less, or " if largest > 0 else ""
    raise ConfigError(
        f"--gpu-memory-utilization {share:g}: a new version of the weights is staged beside the engine and takes "
        f"{need / _GIB:.1f} GiB, but {(1 - share) * gpu_bytes / _GIB:.1f} of {gpu_bytes / _GIB:.1f} GiB are left; use "
        f"{remedy}--weight-transport gloo, which stages in the machine's memory"
    )
